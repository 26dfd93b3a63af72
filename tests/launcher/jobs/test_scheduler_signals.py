"""The signals that Slurm and Kubernetes send to their launchers when a job's time is over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.background import WAIT_S, Node
from tests.launcher.cluster import Cluster
from tests.support.machine import needs_machine
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

_SCRIPT = """
import os, pathlib, signal
rank = os.environ["RANK"]
asked = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
print("ready", flush=True)
while True:
    number = signal.sigwait(asked)
    (pathlib.Path(__file__).parent / f"{number.name}_{rank}").touch()
    print("got", number.name, flush=True)
    if number == signal.SIGTERM:
        break
"""
# The first process of a container has no handler but its own, and inherits every orphan.
_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def job(tmp_path):
    made = Cluster(tmp_path, _SCRIPT)
    yield made
    made.close()
    assert made.left() == []


def _started(job: Cluster, *before: str) -> list[Node]:
    nodes = [job.start("--nnodes", "2", rank=rank, nproc=1, before=before) for rank in range(2)]
    for node in nodes:
        node.wait_for("ready")
    return nodes


def _got(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("SIG*"))


def _check_end(job: Cluster) -> None:
    report = read_json(job.nodes[0].run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"], report["incidents"]) == ("signal", 143, [])


def test_slurm_warns_the_ranks_before_the_time_limit_and_then_stops_them(job, tmp_path):
    nodes = _started(job, "setsid")  # a task leads its process group, which slurmstepd signals
    for node in nodes:
        os.killpg(node.process.pid, signal.SIGUSR1)  # --signal=USR1@120
    for node in nodes:
        node.wait_for("got SIGUSR1")
    for node in nodes:
        for number in (signal.SIGCONT, signal.SIGTERM):  # the limit; SIGKILL after KillWait
            os.killpg(node.process.pid, number)
    assert [node.end() for node in nodes] == [143, 143], job.told()
    assert _got(tmp_path) == ["SIGTERM_0", "SIGTERM_1", "SIGUSR1_0", "SIGUSR1_1"], job.told()
    _check_end(job)


@pytest.mark.netns
@needs_machine
def test_deleted_pods_whose_first_process_is_the_launcher_let_their_ranks_save(job, tmp_path):
    pods = _started(job, *_CONTAINER)
    for pod in pods:
        os.kill(_first_process(pod), signal.SIGTERM)
    # `unshare` reports the exit code of what it ran.
    assert [pod.end() for pod in pods] == [143, 143], job.told()
    assert _got(tmp_path) == ["SIGTERM_0", "SIGTERM_1"], job.told()
    _check_end(job)


def _first_process(pod: Node) -> int:
    """Return the pid, outside, of the first process in a pod's namespace."""
    pid = pod.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + WAIT_S
    while not (found := children.read_text().split()):
        assert time.monotonic() < deadline, pod.lines
    return int(found[0])
