"""Jobs whose world grows: a node that connects late adds its ranks at the end of a step."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

_BITS = re.compile(r"bits (\w+) of (\d)$")

# From step 3 on, the ranks wait in each step until `full` ranks have joined; with "go", the first
# ranks wait in step 3 for a file. "2@start" kills rank 2's first process there, "2!start" lets rank
# 2 exit, "2#start" lets it hang, and "2~start" lets it load indefinitely.
_TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.canonical import even_runs
from echelon.dist.fsdp import fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, split
from echelon.dist.resilient import joining
from echelon.recorder import span
from echelon.train.same_bits import SameBits, SameBitsPipeline, fingerprint

WAITS_AT, TOTAL = 3, 12
layout, full, *ends = sys.argv[1:]
full, GO = int(full), Path(sys.argv[0]).with_name("go")
torch.set_num_threads(1)
newest = [0]

def note(joins, epoch, real=joining.Joins.note):
    real(joins, epoch)
    newest[0] = epoch.number

joining.Joins.note = note

def end_if(moment):
    folder = Path(os.environ["ECHELON_RANK_DIR"])
    is_first = not list(folder.parent.glob("lost_*"))
    if is_first and f"{os.environ['RANK']}@{moment}" in ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if f"{os.environ['RANK']}!{moment}" in ends:
        raise SystemExit(3)
    if f"{os.environ['RANK']}#{moment}" in ends:
        time.sleep(3600)
    while f"{os.environ['RANK']}~{moment}" in ends:
        with span("loads"):
            time.sleep(0.1)

def wait(step, world):
    if step == WAITS_AT and not world.epoch:
        print("trains", flush=True)
    limit_s = time.monotonic() + 300
    while "go" in ends and step == WAITS_AT and not GO.exists():
        with span("waits"):  # else a slow start of another process is a stall of this one
            time.sleep(0.01)
    while step >= WAITS_AT and world.group.size < full and newest[0] <= world.epoch:
        assert time.monotonic() < limit_s, "no rank joins"
        with span("waits"):
            time.sleep(0.01)

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))

def data(step, number):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + number))

def train():
    model = make()
    if layout == "sharded":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(world):
        if world.epoch:
            end_if("prepare")
        same = SameBits(model, optimizer, micro_batches=12, group=world.group, probe=False)

        def train_step(step):
            end_if(f"step {step}")
            wait(step, world)
            same.backward(step, lambda number: model(data(step, number)).square().mean())
            optimizer.step()

        return train_step

    resilient.run(prepare, model, optimizer, total=TOTAL)
    return fingerprint(model, optimizer)

def train_pipeline():
    def build(world):
        depth = 2 if world.group.size % 2 == 0 else 1
        mesh = DeviceMesh((depth, world.group.size // depth), ("pp", "dp"))
        pp, dp = mesh.group("pp"), mesh.group("dp")
        stage = Stage(split(make(), depth)[pp.rank], index=pp.rank, num_stages=depth)
        micro_batches = len(even_runs(12, dp.size)[dp.rank])
        pipe = Pipeline([stage], group=pp, replicas=dp, num_microbatches=micro_batches,
                        loss_fn=torch.nn.MSELoss())
        optimizer = torch.optim.AdamW(pipe.parameters())
        same = SameBitsPipeline(pipe, optimizer, micro_batches=12, probe=False)

        def train_step(step):
            wait(step, world)
            same.backward(step, lambda number: (data(step, number), torch.zeros(2, 3)))
            optimizer.step()

        return resilient.PipelineSetup(pipe, optimizer, train_step)

    made = resilient.run_pipeline(build, total=TOTAL)
    return fingerprint(made.pipe, made.optimizer)

dist.init(timeout_s=300)
end_if("start")
bits = train_pipeline() if layout == "pipeline" else train()
print("bits", bits, "of", dist.world().size, flush=True)
dist.shutdown()
"""


@pytest.fixture
def job(cluster):
    """Return a function that starts the next node of a job with some ranks."""

    def start_job(*program: str, nodes: str = "1:3"):
        job = cluster(_TRAINING, *program)

        def start(num_ranks: int, *more: str) -> Node:
            place = {"rank": len(job.nodes)}
            return job.start(
                "--nnodes", nodes, "--on-loss", "replace", "--max-restarts", "0",
                "--rdzv-conf", "last_call_timeout=0", *more, nproc=num_ranks, **place,
            )  # fmt: skip

        return start

    return start_job


def _bits(*nodes: Node) -> set[tuple[str, str]]:
    found = [_BITS.search(line) for node in nodes for line in node.lines]
    return {(one[1], one[2]) for one in found if one}


def _told(*nodes: Node) -> str:
    return "\n".join(f"{n}: {line}" for n, one in enumerate(nodes) for line in one.lines)


def _undisturbed(tmp_path: Path, layout: str = "replicated") -> str:
    """Return the bits of one rank that nothing disturbs."""
    alone = Node(
        tmp_path / "alone", ["--nproc-per-node", "1", str(tmp_path / "train.py"), "x", "1"]
    )
    assert alone.end() == 0, alone.lines
    alone.close()
    ((bits, _),) = _bits(alone)
    return bits


@pytest.mark.parametrize("layout", ["replicated", "sharded", "pipeline"])
def test_nodes_that_connect_late_add_their_ranks_to_the_running_world(job, tmp_path, layout):
    start = job(layout, "5")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("new rank 2 ready in")
    third = start(2)
    codes = [node.end() for node in (first, second, third)]
    told = _told(first, second, third)
    assert codes == [0, 0, 0], told
    assert _bits(first, second, third) == {(_undisturbed(tmp_path, layout), "5")}, told
    assert "adds rank 2" in told
    assert "adds ranks 3 and 4" in told
    assert "all 5 ranks finished successfully" in told
    report = read_json(first.run_dir / "report.json")
    assert (report["world_size"], report["attempts"], report["incidents"]) == (5, 1, []), told
    assert [one["joined_ranks"] for one in report["continuations"]] == [[2], [3, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["replicated", "sharded", "pipeline"])
def test_several_nodes_that_connect_at_once_all_join(job, tmp_path, layout):
    start = job(layout, "5", nodes="1:4")
    first = start(2)
    first.wait_for("trains", 2)
    others = [start(1) for _ in range(3)]
    codes = [node.end() for node in (first, *others)]
    told = _told(first, *others)
    assert codes == [0, 0, 0, 0], told
    assert _bits(first, *others) == {(_undisturbed(tmp_path, layout), "5")}, told
    joins = read_json(first.run_dir / "report.json")["continuations"]
    assert sorted(rank for one in joins for rank in one["joined_ranks"]) == [2, 3, 4], told


@pytest.mark.parametrize("layout", [pytest.param("replicated", marks=pytest.mark.slow), "sharded"])
def test_ranks_are_lost_and_replaced_while_nodes_join(job, tmp_path, layout):
    start = job(layout, "5", "1@step 2", "2@prepare", "3@step 4", nodes="1:4")
    first = start(2)
    first.wait_for("rank 1 is lost")
    others = [start(1) for _ in range(3)]
    codes = [node.end() for node in (first, *others)]
    told = _told(first, *others)
    assert codes == [0, 0, 0, 0], told
    assert _bits(first, *others) == {(_undisturbed(tmp_path, layout), "5")}, told


@pytest.mark.parametrize("layout", ["replicated", "sharded", "pipeline"])
def test_a_world_of_one_rank_grows(job, tmp_path, layout):
    start = job(layout, "2", nodes="1:2")
    first = start(1)
    first.wait_for("trains")
    second = start(1)
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [0, 0], told
    assert _bits(first, second) == {(_undisturbed(tmp_path, layout), "2")}, told


def _reason(node: Node) -> list[dict[str, object]]:
    return read_json(node.run_dir / "report.json")["not_replaced"]


def test_a_new_rank_that_is_killed_before_it_joins_is_started_again(job, tmp_path):
    start = job("replicated", "3", "2@start")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [0, 0], told
    assert "new rank 2 was killed by SIGKILL before it joined" in told
    assert _bits(first, second) == {(_undisturbed(tmp_path), "3")}, told
    assert _reason(first) == [], told


def test_a_new_rank_that_exits_leaves_the_others_as_they_are(job, tmp_path):
    start = job("replicated", "2", "2!start", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("new rank 2 exited with code 3 before it joined")
    (tmp_path / "go").touch()
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [0, 0], told
    assert "all 2 ranks finished successfully" in told
    assert _bits(first, second) == {(_undisturbed(tmp_path), "2")}, told
    report = read_json(first.run_dir / "report.json")
    assert (report["world_size"], report["incidents"]) == (2, []), told
    assert [one["rank"] for one in report["ranks"]] == [0, 1], told


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_a_new_rank_that_dies_while_it_joins_or_later_is_replaced(job, tmp_path, layout):
    start = job(layout, "4", "2@prepare", "3@step 6")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(2)
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [0, 0], told
    assert _bits(first, second) == {(_undisturbed(tmp_path), "4")}, told
    assert "rank 2 is lost" in told
    assert "rank 3 is lost" in told


def test_a_node_that_is_lost_before_its_ranks_join_changes_nothing(job, tmp_path):
    start = job("replicated", "2", "2#start", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    second.process.kill()
    first.wait_for("lost node")
    (tmp_path / "go").touch()
    assert first.end() == 0, first.lines
    assert "all 2 ranks finished successfully" in _told(first)
    assert _bits(first) == {(_undisturbed(tmp_path), "2")}, first.lines


def test_a_verdict_knows_the_ranks_that_have_joined(job, tmp_path):
    start = job("replicated", "3", "2#step 6")
    first = start(2, "--stall-timeout", "5", "--on-stall", "restart")
    first.wait_for("trains", 2)
    second = start(1)
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes[0] == codes[1] != 0, told
    verdict = read_json(first.run_dir / "dump/latest/verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [2]), told
    assert "read 3 of 3 ranks" in told, told


def test_a_failure_while_a_new_rank_loads_is_blamed_on_the_rank_that_failed(job, tmp_path):
    start = job("replicated", "2", "2#start", "0!step 5", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    (tmp_path / "go").touch()
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [3, 3], told
    report = read_json(first.run_dir / "report.json")
    assert report["world_size"] == 2, told
    assert report["incidents"][0]["verdict"]["culprit_ranks"] == [0], told
    assert [one["rank"] for one in report["ranks"]] == [0, 1], told
    assert "read 2 of 2 ranks" in told, told


def test_a_new_rank_that_is_not_ready_before_the_last_step_is_dismissed(job, tmp_path):
    start = job("replicated", "2", "2#start", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    (tmp_path / "go").touch()
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [0, 0], told
    assert "new rank 2 does not join: the other ranks have finished" in told
    assert "all 2 ranks finished successfully" in told


def test_a_hang_is_ended_while_a_new_rank_loads(job, tmp_path):
    start = job("replicated", "2", "1#step 4", "2~start", "go")
    first = start(2, "--stall-timeout", "4", "--on-stall", "stop")
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    (tmp_path / "go").touch()
    codes = [first.end(), second.end()]
    told = _told(first, second)
    assert codes == [3, 3], told
    verdict = read_json(first.run_dir / "dump/latest/verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [1]), told
    assert "stall cleared" not in told


def test_a_failure_after_a_late_node_was_lost_is_a_failure(job, tmp_path):
    start = job("replicated", "2", "2#start", "0!step 5", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    second.process.kill()
    first.wait_for("lost node")
    (tmp_path / "go").touch()
    assert first.end() == 3, first.lines
    report = read_json(first.run_dir / "report.json")
    assert report["incidents"][0]["verdict"]["culprit_ranks"] == [0], first.lines


def test_a_node_whose_ranks_have_not_joined_leaves_alone(job, tmp_path):
    start = job("replicated", "2", "2#start", "go")
    first = start(2)
    first.wait_for("trains", 2)
    second = start(1)
    first.wait_for("adds rank 2")
    second.process.terminate()
    assert second.end() == 128 + signal.SIGTERM, second.lines
    (tmp_path / "go").touch()
    assert first.end() == 0, first.lines
    assert read_json(first.run_dir / "report.json")["attempts"] == 1, first.lines
