"""Schedulers that signal every process of a node: launcher, guard, store and ranks at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.launcher.cluster import Cluster
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

# A rank that is told to stop meets the others at the job's store before it saves.
_SCRIPT = """
import os, pathlib, signal, sys
from echelon.store import TCPStore
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
size = int(os.environ["WORLD_SIZE"])
asked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
print("ready", restart, "of", size, flush=True)
if sys.argv[1:] == ["once"] and restart == "1":
    sys.exit(0)
if sys.argv[1:] == ["die"]:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
signal.sigwait(asked)
if sys.argv[1:] != ["alone"]:
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    store.set(f"saves/{rank}", b"")
    store.wait([f"saves/{other}" for other in range(size)])
(pathlib.Path(__file__).parent / f"saved_{restart}_{rank}").touch()
print("saved", flush=True)
"""


def _started(job: Cluster, num_nodes: int, *options: str, nproc: int = 1) -> list[Node]:
    nodes = [job.start(*options, rank=rank, nproc=nproc) for rank in range(num_nodes)]
    for node in nodes:
        node.wait_for("ready 0", nproc)
    return nodes


def _signal_group(job: Cluster, number: int, *nodes: int) -> None:
    """Signal all processes of these nodes, launchers last: their ranks may be gone by then."""
    for node in nodes:
        launcher = job.nodes[node].process.pid
        pids = [pid for pid in job.marked(node) if pid != launcher]
        assert len(pids) >= 2, "no guard, or no rank"
        for pid in [*pids, launcher]:
            os.kill(pid, number)


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved_*"))


def test_the_store_outlives_the_ranks_that_meet_there_to_save(cluster, tmp_path):
    job = cluster(_SCRIPT)
    nodes = _started(job, 2, "--nnodes", "2")
    _signal_group(job, signal.SIGTERM, 0, 1)
    assert [node.end() for node in nodes] == [143, 143], job.told()
    assert _saved(tmp_path) == ["saved_0_0", "saved_0_1"], job.told()
    report = read_json(nodes[0].run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"], report["incidents"]) == ("signal", 143, [])


def test_a_node_that_is_signaled_whole_leaves_and_the_others_continue(cluster, tmp_path):
    job = cluster(_SCRIPT, "once")
    options = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60")
    first, second = _started(job, 2, *options)
    _signal_group(job, signal.SIGTERM, 1)
    assert second.end() == 143, job.told()
    assert first.end() == 0, job.told()
    assert _saved(tmp_path) == ["saved_0_0", "saved_0_1"], job.told()
    report = read_json(first.run_dir / "report.json")
    assert (report["exit_code"], report["attempts"], report["incidents"]) == (0, 2, [])


def test_ranks_that_the_signal_ends_at_once_have_not_failed(cluster):
    job = cluster(_SCRIPT, "die")
    (node,) = _started(job, 1, "--nnodes", "1", "--max-restarts", "3", nproc=2)
    _signal_group(job, signal.SIGTERM, 0)
    assert node.end() == 143, job.told()
    report = read_json(node.run_dir / "report.json")
    assert (report["ended_by"], report["attempts"], report["incidents"]) == ("signal", 1, [])
