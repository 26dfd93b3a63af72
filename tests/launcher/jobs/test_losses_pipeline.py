"""A launched job with a pipeline that continues without a rank that is killed."""

from __future__ import annotations

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_TRAINING = """
import os, signal, sys, time
import torch
from torch import nn
import echelon.dist as dist
from echelon.dist import resilient, runtime
from echelon.dist.resilient import joining
from echelon.dist.canonical import even_runs
from echelon.dist.mesh import DeviceMesh
from echelon.dist.pipeline import Pipeline, Stage, split
from echelon.train.same_bits import SameBits, SameBitsPipeline, fingerprint

TOTAL, KILLED_STEP, MEETS_AT = 12, 5, 7
torch.set_num_threads(1)
newest = [0]

def note(joins, epoch, real=joining.Joins.note):
    real(joins, epoch)
    newest[0] = epoch.number

joining.Joins.note = note

def wait_until_joined(world):
    limit_s = time.monotonic() + 600.0
    while newest[0] <= world.epoch and runtime.first_error() is None:
        assert time.monotonic() < limit_s, "no rank has joined"
        time.sleep(0.005)

def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.2), nn.Linear(7, 7), nn.Linear(7, 3))

def batch(step, number):
    data = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(2, 6, generator=data), torch.randn(2, 3, generator=data)

def train_pipeline():
    me = dist.init(timeout_s=60).rank

    def build(world):
        size = world.group.size
        depth = 2 if size % 2 == 0 else size  # 2 x 2 stages and replicas, then 3 x 1
        mesh = DeviceMesh((depth, size // depth), ("pp", "dp"))
        pp, dp = mesh.group("pp"), mesh.group("dp")
        stage = Stage(split(layers(), depth)[pp.rank], index=pp.rank, num_stages=depth)
        pipe = Pipeline(
            [stage], group=pp, replicas=dp, num_microbatches=len(even_runs(6, dp.size)[dp.rank]),
            loss_fn=nn.MSELoss(),
        )
        optimizer = torch.optim.AdamW(pipe.parameters())
        same = SameBitsPipeline(
            pipe, optimizer, micro_batches=6, seed=1, probe=world.epoch == 0
        )

        def train_step(step):
            if me == 1 and step == KILLED_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            if "--wait" in sys.argv and step == MEETS_AT:
                wait_until_joined(world)
            same.backward(step, lambda number: batch(step, number))
            optimizer.step()

        return resilient.PipelineSetup(pipe, optimizer, train_step)

    setup = resilient.run_pipeline(build, total=TOTAL)
    found = fingerprint(setup.pipe, setup.optimizer)
    print(found, dist.world().size, setup.pipe.group.size, flush=True)
    dist.shutdown()
    return found

def train_whole():
    dist.init()
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    same = SameBits(model, optimizer, micro_batches=6, seed=1)
    for step in range(TOTAL):
        def loss_of(number):
            inputs, targets = batch(step, number)
            return nn.functional.mse_loss(model(inputs), targets)
        same.backward(step, loss_of)
        optimizer.step()
    return fingerprint(model, optimizer)

found = train_pipeline()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train_whole() == found, "other bits than those of the whole model on one rank"
"""


def test_a_killed_rank_of_a_pipeline_is_continued_without(tmp_path):
    """Two replicas of two stages become three stages, which end with the whole model's bits."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", "4", "--on-loss", "shrink", "--run-dir", str(run_dir),
        str(script),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split()[-3:] for line in done.stdout.splitlines()]
    assert len(lines) == 3, done.stdout
    assert len({bits for bits, _, _ in lines}) == 1
    assert {tuple(sizes) for _, *sizes in lines} == {("3", "3")}
    assert "rank 1 is lost; continuing with ranks 0, 2 and 3" in done.stderr
    assert "step 5 repeated, 0 steps lost" in done.stderr
    report = read_json(run_dir / "report.json")
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9, 0, 0]
    (continued,) = report["continuations"]
    assert (continued["lost_ranks"], continued["step"]) == ([1], 5)
    (kill,) = report["incidents"]
    assert (kill["verdict"]["cause"], kill["verdict"]["culprit_ranks"]) == ("dead_process", [1])
    assert kill["recovered"]


@pytest.mark.slow
def test_a_killed_rank_of_a_pipeline_is_replaced(tmp_path):
    """The process that joins builds a stage, and fills it from the copies."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", "4", "--on-loss", "replace", "--run-dir", str(run_dir),
        str(script), "--wait",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.split()[-3:] for line in done.stdout.splitlines()]
    assert len(lines) == 4, done.stdout
    assert len({bits for bits, _, _ in lines}) == 1
    assert {tuple(sizes) for _, *sizes in lines} == {("4", "2")}
    assert "joined at step 8; 4 of 4 ranks" in done.stderr, done.stderr
    report = read_json(run_dir / "report.json")
    assert [rank["exit_code"] for rank in report["ranks"]] == [0] * 4
    loss, join = report["continuations"]
    assert (loss["lost_ranks"], loss["num_ranks"], loss["step"]) == ([1], 3, 5)
    assert (join["joined_ranks"], join["num_ranks"], join["step"]) == ([1], 4, 8)
