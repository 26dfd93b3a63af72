"""A job over two hosts that continues without a rank that is killed, and a host that is cut off."""

from __future__ import annotations

import pytest

from tests.launcher.background import Node
from tests.support.hosts import hosts, needs_hosts
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_hosts]

_KILLED, _CUT, _TOTAL = 5, 12, 20  # steps

_TRAINING = f"""
import os, signal, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

is_cut = Path(sys.argv[1])

def train():
    rank = dist.init(timeout_s=300).rank
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(world):
        print("backend", world.group.backend, world.group.size, flush=True)
        same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

        def train_step(step):
            if rank == 2 and step == {_KILLED}:
                os.kill(os.getpid(), signal.SIGKILL)
            while rank == 0 and step == {_CUT} and not is_cut.exists():
                time.sleep(0.01)
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            optimizer.step()

        return train_step

    resilient.run(
        prepare, model, optimizer, total={_TOTAL},
        on_commit=lambda step, _: print("committed", step, flush=True),
    )
    dist.shutdown()
    return fingerprint(model, optimizer)

found = train()
os.environ |= {{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}}
del os.environ["MASTER_ADDR"]
assert train() == found, "other bits than on one rank that nothing disturbs"
print("the same bits", flush=True)
"""


def test_a_rank_dies_and_then_its_host_is_cut_off(tmp_path):
    pytest.importorskip("torch")
    script, is_cut = tmp_path / "train.py", tmp_path / "cut"
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
                            "--rdzv-conf", "lost_after=6", "--nproc-per-node", f"{1 + index}",
                            "--node-rank", f"{index}", "--on-loss", "shrink", str(script),
                            str(is_cut),
                        ],
                        before=host.command(),
                        environ={"ECHELON_SECRET": "a-secret-of-the-tests"},
                    )
                )  # fmt: skip
            first, second = nodes
            first.wait_for("continued with 2 of 3 ranks")
            second.wait_for(f"committed {_CUT - 1}")
            made[1].cut()
            is_cut.touch()
            codes = [node.end() for node in nodes]
        finally:
            for node in nodes:
                node.close()
    told = "\n".join(line for node in nodes for line in node.lines)
    assert codes == [0, 1], told
    for line in (
        "rank 2 is lost; continuing with ranks 0 and 1",
        "rank 1 is lost; continuing with rank 0",
        "continued with 1 of 3 ranks in ",
        "1 of 3 ranks finished successfully",
        "the same bits",
    ):
        assert first.has(line), told
    assert not second.has(f"committed {_CUT}"), told
    assert second.has("--on-loss shrink does not cover that"), told
    report = read_json(first.run_dir / "report.json")
    assert [one["lost_ranks"] for one in report["continuations"]] == [[2], [1, 2]]
    assert all(one["recovered"] for one in report["incidents"])
