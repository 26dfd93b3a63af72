"""Jobs over several hosts in which another node takes the place of one that is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from tests.launcher.background import Node
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_hosts]

_BITS = re.compile(r"bits (\w+)$")

# Rank 0 waits in step 5 until the test has ended a node. From step 8 on, the ranks wait in each
# step until more of those that are to join have been admitted.
_TRAINING = """
import os, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient import joining
from echelon.train.same_bits import SameBits, fingerprint

LOST_AT, MEETS_AT, TOTAL = 5, 8, 14
is_lost, is_sharded = Path(sys.argv[1]), sys.argv[2] == "sharded"
holds = is_lost.with_name("holds")  # rank 0, in the last step
torch.set_num_threads(1)
newest = [0]

def note(joins, epoch, real=joining.Joins.note):
    real(joins, epoch)
    newest[0] = epoch.number

joining.Joins.note = note

def train():
    rank, full = dist.init(timeout_s=300).rank, dist.world().size
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(world):
        same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

        def train_step(step):
            if rank == 0 and full > 1 and step == LOST_AT:
                print("holds step", step, flush=True)
            while rank == 0 and full > 1 and step == LOST_AT and not is_lost.exists():
                time.sleep(0.01)
            while full > 1 and step >= MEETS_AT and world.group.size < full:
                if newest[0] > world.epoch:
                    break
                time.sleep(0.01)
            while rank == 0 and full > 1 and step == TOTAL - 1 and holds.exists():
                time.sleep(0.01)
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            optimizer.step()

        return train_step

    def say(step, _):
        print("committed", step, "of", dist.world().size, flush=True)

    resilient.run(prepare, model, optimizer, total=TOTAL, on_commit=say)
    bits = fingerprint(model, optimizer)
    dist.shutdown()
    return bits

print(f"bits {train()}", flush=True)
"""


def _options(made: list[Host], script, is_lost, layout: str, *, spares: int) -> list[str]:
    return [
        "--rdzv-endpoint", f"{made[0].address}:29400", "--nnodes", "2:2", "--spares", f"{spares}",
        "--rdzv-conf", "lost_after=6", "--nproc-per-node", "2", "--on-loss", "replace",
        "--max-restarts", "0", str(script), str(is_lost), layout,
    ]  # fmt: skip


def _pids(host: Host) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def _kill_all(host: Host) -> None:
    for pid in _pids(host):
        os.kill(pid, signal.SIGKILL)


class _Job:
    """Launchers on hosts, each with its own run directory."""

    def __init__(self, tmp_path, made: list[Host], layout: str, *, spares: int) -> None:
        script, self.is_lost = tmp_path / "train.py", tmp_path / "lost"
        script.write_text(_TRAINING)
        self._tmp_path, self._made = tmp_path, made
        self._options = _options(made, script, self.is_lost, layout, spares=spares)
        self.nodes: list[Node] = []

    def start(self, host: int) -> Node:
        node = Node(
            self._tmp_path / f"run_{len(self.nodes)}",
            self._options,
            before=self._made[host].command(),
            environ={"ECHELON_SECRET": "a-secret-of-the-tests"},
        )
        self.nodes.append(node)
        return node

    def told(self) -> str:
        return "\n".join(f"{n}: {line}" for n, one in enumerate(self.nodes) for line in one.lines)

    def bits(self) -> set[str]:
        found = [_BITS.search(line) for node in self.nodes for line in node.lines]
        return {one[1] for one in found if one}

    def num_bits(self) -> int:
        return sum(bool(_BITS.search(line)) for node in self.nodes for line in node.lines)


def _undisturbed(tmp_path) -> str:
    """Return the bits of one rank that nothing disturbs."""
    script = tmp_path / "train.py"
    alone = Node(tmp_path / "alone", ["--nproc-per-node", "1", str(script), "x", "replicated"])
    assert alone.end() == 0, alone.lines
    alone.close()
    (bits,) = (one[1] for line in alone.lines if (one := _BITS.search(line)))
    return bits


def _check(job: _Job, tmp_path, codes: list[int | None], expected: list[int | None]) -> None:
    told = job.told()
    assert codes == expected, told
    assert job.num_bits() == 4, told
    assert job.bits() == {_undisturbed(tmp_path)}, told
    first = job.nodes[0]
    assert first.has("with ranks 2 and 3"), told
    assert first.has("all 4 ranks finished successfully"), told
    report = read_json(first.run_dir / "report.json")
    loss, *joins = report["continuations"]
    assert (loss["lost_ranks"], loss["joined_ranks"], loss["repeated"]) == ([2, 3], [], True), told
    assert sorted(rank for one in joins for rank in one["joined_ranks"]) == [2, 3], told
    assert not any(one["repeated"] for one in joins), told
    assert report["not_replaced"] == []
    assert report["attempts"] == 1


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_spare_node_takes_the_place_of_a_killed_one(tmp_path, layout):
    pytest.importorskip("torch")
    with hosts(3) as made:
        job = _Job(tmp_path, made, layout, spares=1)
        try:
            first, second = job.start(0), job.start(1)
            first.wait_for("starting 4 ranks")
            spare = job.start(2)
            first.wait_for("holds step 5")
            second.wait_for("committed 3 of 4")
            first.wait_for("it will join at the next restart")
            _kill_all(made[1])
            job.is_lost.touch()
            codes = [node.end() for node in (first, spare)]
        finally:
            for node in job.nodes:
                node.close()
    _check(job, tmp_path, codes, [0, 0])


def test_a_node_that_is_cut_off_and_one_that_connects_later(tmp_path):
    """The node that was cut off ends its ranks by itself, and never joins again."""
    pytest.importorskip("torch")
    with hosts(3) as made:
        job = _Job(tmp_path, made, "sharded", spares=0)
        try:
            first, second = job.start(0), job.start(1)
            first.wait_for("holds step 5")
            second.wait_for("committed 3 of 4")
            made[1].cut()
            job.is_lost.touch()
            first.wait_for("ranks 2 and 3 are not replaced: the node was lost")
            late = job.start(2)
            codes = [node.end() for node in (first, second, late)]
        finally:
            for node in job.nodes:
                node.close()
    assert not second.has("committed 8"), job.told()
    _check(job, tmp_path, codes, [0, 1, 0])


def test_a_node_that_was_frozen_finds_that_its_ranks_were_replaced(tmp_path):
    """Its ranks run again with their connections to the store, and must not join the others."""
    pytest.importorskip("torch")
    with hosts(3) as made:
        job = _Job(tmp_path, made, "replicated", spares=1)
        holds = tmp_path / "holds"
        holds.touch()
        try:
            first, second = job.start(0), job.start(1)
            first.wait_for("starting 4 ranks")
            spare = job.start(2)
            first.wait_for("it will join at the next restart")
            first.wait_for("holds step 5")
            second.wait_for("committed 3 of 4")
            frozen = _pids(made[1])
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            job.is_lost.touch()
            first.wait_for("4 of 4 ranks")
            for pid in reversed(frozen):
                os.kill(pid, signal.SIGCONT)
            code = second.end()
            holds.unlink()
            codes = [node.end() for node in (first, spare)]
        finally:
            for node in job.nodes:
                node.close()
    assert code == 1, job.told()
    assert second.has("another process has taken the place of rank"), job.told()
    assert not second.has("committed 8"), job.told()
    _check(job, tmp_path, codes, [0, 0])


def test_a_launcher_that_is_started_again_takes_its_ranks_back(tmp_path):
    pytest.importorskip("torch")
    with hosts(2) as made:
        job = _Job(tmp_path, made, "replicated", spares=0)
        try:
            first, second = job.start(0), job.start(1)
            first.wait_for("holds step 5")
            second.wait_for("committed 3 of 4")
            _kill_all(made[1])
            job.is_lost.touch()
            first.wait_for("ranks 2 and 3 are not replaced: the node was lost")
            again = job.start(1)
            codes = [node.end() for node in (first, again)]
        finally:
            for node in job.nodes:
                node.close()
    _check(job, tmp_path, codes, [0, 0])


def test_a_spare_that_is_killed_while_its_ranks_start_is_followed_by_another(tmp_path):
    pytest.importorskip("torch")
    with hosts(4) as made:
        job = _Job(tmp_path, made, "replicated", spares=2)
        try:
            first, second = job.start(0), job.start(1)
            first.wait_for("starting 4 ranks")
            spare = job.start(2)
            first.wait_for("it will join at the next restart")
            first.wait_for("holds step 5")
            second.wait_for("committed 3 of 4")
            _kill_all(made[1])
            job.is_lost.touch()
            spare.wait_for("joining ranks that are already training; ranks 2-3 run on this node")
            _kill_all(made[2])
            other = job.start(3)
            codes = [node.end() for node in (first, other)]
        finally:
            for node in job.nodes:
                node.close()
    _check(job, tmp_path, codes, [0, 0])
