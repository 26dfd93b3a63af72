"""Jobs over several hosts, each in its own network namespace, with faults on their links."""

from __future__ import annotations

import textwrap

import pytest

from echelon.recorder.read import read
from tests.launcher.background import Node
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_hosts]

_SCRIPT = """
import os, signal, sys
import numpy as np
import echelon.dist as dist
world = dist.init(timeout_s=300)  # two processors may have to start eight processes
x = np.full(1000, world.rank + 1.0)
world.all_reduce(x)
print("sum", x[0], world.backend, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if sys.argv[1] == "hold" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if world.rank < 2:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as a program that saves its state
    print("holding", flush=True)
    if world.rank == 3:
        signal.pause()
    world.all_reduce(x)
while sys.argv[1] == "train":
    world.all_reduce(x, op="max")
    steps = globals().get("steps", 0) + 1
    if steps == 20:
        print("training", flush=True)
world.barrier()
dist.shutdown()
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    nodes: list[Node] = []

    def begin(made: list[Host], *options: str, arg: str) -> list[Node]:
        meeting = ["--rdzv-endpoint", f"{made[0].address}:29400", "--nproc-per-node", "2"]
        for index, host in enumerate(made):
            nodes.append(
                Node(
                    tmp_path / f"node_{index}",
                    [*meeting, *options, str(script), arg],
                    before=host.command(),
                    environ={"ECHELON_SECRET": "a-secret-of-the-tests"},
                )
            )
        return list(nodes)

    yield begin
    for node in nodes:
        node.close()


def test_two_hosts_train_together(start):
    pytest.importorskip("torch")
    with hosts(2) as made:
        nodes = start(made, "--nnodes", "2", arg="end")
        codes = [node.end() for node in nodes]
    assert codes == [0, 0], "\n".join(line for node in nodes for line in node.lines)
    for index, node in enumerate(nodes):
        assert sum("sum 10.0" in line for line in node.lines) == 2, node.lines
        rank = 2 * index
        identity = read(node.run_dir / f"rank_{rank}/attempt_0/ring").identity
        assert identity.clock_error_ns >= 0, "namespaces share a clock, and the ranks found out"


def test_a_host_that_is_cut_off_is_lost_and_the_rest_goes_on(start):
    pytest.importorskip("torch")
    with hosts(2) as made:
        conf = "last_call_timeout=60,lost_after=4"
        options = ("--nnodes", "1:2", "--rdzv-conf", conf, "--shutdown-timeout", "3600")
        nodes = start(made, *options, arg="hold")
        for node in nodes:
            node.wait_for("holding", 2)
        made[1].cut()
        codes = [node.end() for node in nodes]
        assert codes == [0, 1], [node.lines for node in nodes]
    first, second = nodes
    assert any("lost node" in line for line in first.lines), first.lines
    assert sum("sum 3.0" in line for line in first.lines) == 2, first.lines
    report = read_json(first.run_dir / "report.json")
    assert (report["attempts"], report["world_size"]) == (2, 2)
    assert any("lost the coordinator node" in line for line in second.lines), second.lines
    assert (second.run_dir / "dump/latest/rank_3").exists()
    for rank in (0, 1):  # they do not wait for the whole grace period
        errors = (first.run_dir / f"rank_{rank}/attempt_0/stderr.log").read_text()
        assert "ranks 2 and 3 were lost with the node" in errors, errors


def test_packets_that_vanish_between_hosts_are_the_networks_fault(start):
    pytest.importorskip("torch")
    with hosts(2) as made:
        nodes = start(
            made, "--nnodes", "2", "--stall-timeout", "8", "--on-stall", "stop", arg="train"
        )
        nodes[0].wait_for("training")
        for host in made:
            host.swallow(but_port=29400)
        codes = [node.end() for node in nodes]
    assert codes == [3, 3], "\n".join(line for node in nodes for line in node.lines)
    verdict = read_json(nodes[0].run_dir / "dump/latest/verdict.json")["verdict"]
    assert verdict["cause"] == "network", verdict
    assert "not acknowledged" in " ".join(verdict["evidence"]), verdict
