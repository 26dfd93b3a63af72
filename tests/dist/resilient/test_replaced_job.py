"""Launched jobs with a sharded model in which a new process takes a lost rank's place."""

from __future__ import annotations

import re

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = [pytest.mark.slow, pytest.mark.ranks]  # loads torch in each process

_BITS = re.compile(r"bits (\w+) of (\d), committed (\d+) to 19, is (\w+)")

# "1.0@step 5" ends rank 1's first process in step 5. From step 8 on, ranks wait in each step until
# those that are to join are admitted, the first at step 9.
_TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient, runtime
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient import joining
from echelon.train.same_bits import SameBits, fingerprint

TOTAL, FULL, FROZEN_AT, MEETS_AT = 20, int(os.environ["WORLD_SIZE"]), 3, 8
folder = Path(os.environ["ECHELON_RANK_DIR"])
life = len(list(folder.parent.glob("lost_*")))
me = f"{os.environ['RANK']}.{life}"
moments = {one.partition("@")[2] for one in sys.argv[1:] if one.startswith(me + "@")}
newest = [0]
torch.set_num_threads(1)

def die_at(moment):
    if moment in moments:
        os.kill(os.getpid(), signal.SIGKILL)

def note(joins, epoch, real=joining.Joins.note):
    real(joins, epoch)
    newest[0] = epoch.number

joining.Joins.note = note

def wait_until_joined(world):
    limit_s = time.monotonic() + 600.0
    while newest[0] <= world.epoch and runtime.first_error() is None:
        assert time.monotonic() < limit_s, "no rank has joined"
        time.sleep(0.005)

def train(is_disturbed):
    dist.init(timeout_s=300)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.3), torch.nn.Linear(7, 3)
    )
    model[1].eval()  # statistics of a batch depend on how it is divided
    skipped = [model[3].bias]  # replicated
    if is_disturbed:
        fully_shard(model[0])
        fully_shard(model, ignored_params=skipped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    committed = []

    def prepare(world):
        same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

        def train_step(step):
            if is_disturbed:
                die_at(f"step {step}")
                if step >= MEETS_AT and world.group.size < FULL:
                    wait_until_joined(world)
            if step == FROZEN_AT:  # only then: who joins later learns of it from the others
                model[0].bias.requires_grad_(False)
                model[2].eval()
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            with torch.no_grad():
                model[1].running_mean.add_(torch.rand(7))
            optimizer.step()
            schedule.step()

        return train_step

    resilient.run(
        prepare, model, optimizer, total=TOTAL, also=[schedule],
        on_commit=lambda step, _: committed.append(step),
    )
    bits = fingerprint(model, optimizer)
    assert committed == list(range(committed[0], TOTAL)), committed
    facts = f"{model[0].bias.requires_grad}{model[2].training}"
    if is_disturbed:
        size = dist.world().size
        print("bits", bits, "of", f"{size}, committed {committed[0]} to 19, is {facts}", flush=True)
    dist.shutdown()
    return bits

found = train(True)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train(False) == found, "other bits than on one rank that nothing disturbs"
"""


def _run(tmp_path, *deaths, size):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", str(size), "--on-loss", "replace", "--run-dir", str(run_dir),
        str(script), *deaths,
    )  # fmt: skip
    return done, read_json(run_dir / "report.json")


def _ends(done):
    """Return the bits, sizes, first commits and settings that the ranks report."""
    return [set(one) for one in zip(*_BITS.findall(done.stdout), strict=True)]


def _check(done, report, size):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [rank["exit_code"] for rank in report["ranks"]] == [0] * size
    bits, sizes, _, facts = _ends(done)
    assert (len(bits), sizes, facts) == (1, {str(size)}, {"FalseFalse"}), done.stdout


def test_a_killed_rank_of_a_sharded_model_is_replaced(tmp_path):
    done, report = _run(tmp_path, "2.0@step 5", size=4)
    _check(done, report, 4)
    assert _ends(done)[2] == {"0", "9"}, "who joins commits the steps that it has trained"
    assert "joined at step 9; 4 of 4 ranks" in done.stderr, done.stderr
    loss, join = report["continuations"]
    assert (loss["lost_ranks"], loss["joined_ranks"], loss["num_ranks"]) == ([2], [], 3)
    assert (join["lost_ranks"], join["joined_ranks"], join["num_ranks"]) == ([], [2], 4)
    assert (join["step"], join["repeated"], join["steps_lost"]) == (9, False, 0)
