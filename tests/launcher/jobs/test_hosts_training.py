"""Three hosts, two ranks on the last, train `train_gpt.py` while hosts and links fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.runs import EXAMPLES, SMALL_MODEL, read_log
from tests.launcher.background import Node
from tests.launcher.cluster import Cluster
from tests.support.hosts import Host, hosts, needs_hosts, needs_nft, needs_wire
from tests.support.ranks import read_json

pytest.importorskip("torch")
pytestmark = [pytest.mark.netns, needs_hosts]

_PORT = 29400
_IN_PRIVATE_MEMORY = 'mount --bind "$1" /dev/shm && shift && exec "$@"'


class _Training:
    """The job, a host a node; whatever its nodes leave behind can be seen."""

    def __init__(self, folder: Path, made: list[Host], num_steps: int) -> None:
        self.hosts = made
        self.memory = Path("/dev/shm", f"echelon-test-{os.getpid()}-{folder.name}")  # a tmpfs
        self.log = folder / "log"
        text = folder / "text"
        text.write_bytes(
            b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000))
        )
        self.cluster = Cluster(
            folder, EXAMPLES / "train_gpt.py", "--backend", "gloo", *SMALL_MODEL, "--batch", "12",
            "--steps", str(num_steps), "--data", str(text), "--log", str(self.log),
            endpoint=f"{made[0].address}:{_PORT}",
        )  # fmt: skip
        self.num_steps = num_steps

    def start(self, host: int, *options: str) -> Node:
        """Start a node on a host."""
        memory = self.memory / str(host)
        memory.mkdir(parents=True, exist_ok=True)
        inside = ("sh", "-c", _IN_PRIVATE_MEMORY, "sh", str(memory))
        return self.cluster.start(
            *options, rank=host, nproc=1 + (host == 2), before=self.hosts[host].command(*inside)
        )

    def start_all(self, *options: str) -> list[Node]:
        """Start a node on every host, and wait until they train."""
        nodes = [self.start(host, *options) for host in range(len(self.hosts))]
        self.wait_until_trained(nodes[0])
        return nodes

    def wait_until_trained(self, first: Node, num_worlds: int = 1) -> None:
        """Wait until so many worlds have taken a twentieth of their steps."""
        width = len(str(self.num_steps))
        first.wait_for(f"step {self.num_steps // 20:{width}d}/{self.num_steps}", num_worlds)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop rank 0 inside: a small job would end before a node has started."""
        pids = [pid for pid in self.cluster.marked(0) if _is_rank_0(pid)]
        assert pids, "the job has ended"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def steps(self) -> list[int]:
        """Return the steps that the last world took."""
        return [line["step"] for line in read_log(self.log) if "loss" in line]

    def left(self) -> list[str]:
        """Return what is left of the job: processes, files in memory, sockets."""
        processes = [f"process {pid}" for pid in self.cluster.left()]
        segments = [str(path) for path in self.memory.glob("*/*")]
        return processes + segments + [line for host in self.hosts for line in host.sockets()]

    def close(self) -> None:
        """End what has not ended."""
        self.cluster.close()
        for pid in self.cluster.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)


def _is_rank_0(pid: int) -> bool:
    return b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.fixture
def train(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(num_steps: int, *, wired: tuple[int, ...] = ()) -> _Training:
            made = stack.enter_context(hosts(3, wired=wired))
            training = _Training(tmp_path, made, num_steps)
            stack.callback(training.close)
            return training

        yield make


def _culprits(node: Node) -> list[tuple[str, list[int], bool]]:
    """Return cause, culprit ranks and recovery of each incident in a job's report."""
    incidents: list[dict[str, Any]] = read_json(node.run_dir / "report.json")["incidents"]
    return [
        (i["verdict"]["cause"], i["verdict"]["culprit_ranks"], i["recovered"]) for i in incidents
    ]


@pytest.mark.slow  # test_hosts.py cuts a host off; test_nodes.py kills, freezes and rejoins nodes
def test_hosts_are_cut_off_killed_and_frozen_and_training_goes_on(train):
    job = train(160)
    patient = ("--stall-timeout", "600")  # it is held while nodes start
    elastic = ("--nnodes", "1:3", "--rdzv-conf", "last_call_timeout=60,lost_after=4", *patient)
    nodes = job.start_all(*elastic)
    first = nodes[0]

    job.hosts[2].cut()
    first.wait_for("lost node")
    assert nodes[2].end() == 1, job.cluster.told()
    job.wait_until_trained(first, 2)

    job.hosts[2].heal()
    with job.held():
        nodes.append(job.start(2, *elastic))
        first.wait_for("it will join at the next restart")
        second = job.cluster.marked(1)
    for pid in second:
        os.kill(pid, signal.SIGKILL)
    first.wait_for("lost node", 2)
    job.wait_until_trained(first, 3)

    with job.held():
        nodes.append(job.start(1, *elastic))
        first.wait_for("it will join at the next restart", 2)
    nodes[3].process.send_signal(signal.SIGSTOP)
    first.wait_for("lost node", 3)
    job.wait_until_trained(first, 4)
    nodes[3].process.send_signal(signal.SIGCONT)

    codes = [node.end() for node in nodes]
    assert codes == [0, -signal.SIGKILL, 1, 1, 0], job.cluster.told()
    assert job.steps()[-160:] == list(range(1, 161))
    assert _culprits(first) == [
        ("dead_process", [2, 3], True),
        ("dead_process", [1], True),
        ("dead_process", [1, 2], True),
    ]
    for lost in (nodes[2], nodes[3]):
        assert any("lost the coordinator node" in line for line in lost.lines), lost.lines
    assert (nodes[2].run_dir / "dump/latest/rank_3").exists(), "it keeps a story of its own"
    assert job.left() == []


def _ends_well(job: _Training, nodes: list[Node]) -> None:
    codes = [node.end() for node in nodes]
    assert codes == [0, 0, 0], job.cluster.told()
    assert (job.steps(), _culprits(nodes[0])) == (list(range(1, job.num_steps + 1)), [])
    assert job.left() == []


@needs_wire
@pytest.mark.slow
def test_training_goes_on_over_a_slow_link_and_one_that_loses_packets(train):
    job = train(20, wired=(1, 2))
    nodes = job.start_all("--nnodes", "3")
    job.hosts[1].wire.loss = 0.03
    job.hosts[2].wire.delay_s = 0.005
    _ends_well(job, nodes)
    assert job.hosts[1].wire.num_lost > 0
    assert job.hosts[2].wire.num_delayed > 0


@needs_nft
@pytest.mark.slow
def test_training_goes_on_over_a_link_that_loses_packets_in_the_kernel(train):
    job = train(40)
    nodes = job.start_all("--nnodes", "3")
    job.hosts[2].lose(5)
    _ends_well(job, nodes)
    assert job.hosts[2].num_dropped() > 0


@needs_wire
@pytest.mark.slow
def test_training_goes_on_over_a_link_as_slow_as_between_cities(train):
    job = train(20, wired=(2,))
    nodes = job.start_all("--nnodes", "3")
    job.hosts[2].wire.delay_s = 0.02
    _ends_well(job, nodes)
    assert job.hosts[2].wire.num_delayed > 0
