"""A job over two hosts, one of which is cut off in the first step. Slow."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.launcher.background import WAIT_S, Node
from tests.support.hosts import hosts, needs_hosts

pytestmark = [pytest.mark.slow, pytest.mark.netns, needs_hosts]

_TRAINING = """
import os, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

folder = Path(sys.argv[1])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def train(is_alone):
    rank = dist.init(timeout_s=300).rank
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(world):
        same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

        def train_step(step):
            if step == 0 and not is_alone:
                (folder / f"in_step_{rank}").touch()
                wait_for("is_cut")
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            optimizer.step()

        return train_step

    if rank == 1 and not is_alone:
        (folder / "is_ready").touch()
        wait_for("is_stopped")
    resilient.run(prepare, model, optimizer, total=8)
    dist.shutdown()
    return fingerprint(model, optimizer)

found = train(False)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train(True) == found, "other bits than on one rank that nothing disturbs"
print("the same bits", flush=True)
"""


def test_a_host_is_cut_off_in_the_first_step_before_it_reported_its_ranks(tmp_path):
    """Its launcher is stopped when its rank begins, so that only the store has this."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    nodes: list[Node] = []
    with hosts(2) as made:
        try:
            for index, host in enumerate(made):
                nodes.append(
                    Node(
                        tmp_path / f"node_{index}",
                        [
                            "--rdzv-endpoint", f"{made[0].address}:29400", "--nnodes", "2",
                            "--rdzv-conf", "lost_after=30", "--nproc-per-node", "1",
                            "--node-rank", f"{index}", "--on-loss", "shrink", str(script),
                            str(tmp_path),
                        ],
                        before=host.command(),
                        environ={"ECHELON_SECRET": "a-secret-of-the-tests"},
                    )
                )  # fmt: skip
            first, second = nodes
            _wait_for(tmp_path / "is_ready", nodes)
            second.process.send_signal(signal.SIGSTOP)
            (tmp_path / "is_stopped").touch()
            for rank in range(2):
                _wait_for(tmp_path / f"in_step_{rank}", nodes)
            made[1].cut()
            (tmp_path / "is_cut").touch()
            code = first.end()
        finally:
            for node in nodes:
                node.close()
    told = "\n".join(line for node in nodes for line in node.lines)
    assert code == 0, told
    for line in (
        "rank 1 is lost; continuing with rank 0",
        "continued with 1 of 2 ranks in ",
        "step 0 repeated, 0 steps lost",
        "the same bits",
    ):
        assert first.has(line), told


def _wait_for(path: Path, nodes: list[Node]) -> None:
    due_s = time.monotonic() + WAIT_S
    while not path.exists():
        told = "\n".join(line for node in nodes for line in node.lines)
        assert time.monotonic() < due_s, told
        assert all(node.process.poll() is None for node in nodes), told
        time.sleep(0.01)
