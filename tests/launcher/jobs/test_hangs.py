"""Launched jobs that end a rank which hangs, and continue without it."""

from __future__ import annotations

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = [pytest.mark.slow, pytest.mark.ranks]  # each waits for stall timeouts

_TRAINING = """
import os, signal, sys, time
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

hangs = {int(rank): (how, int(step)) for rank, how, step in
         (one.split(":") for one in sys.argv[1:])}

def train(is_disturbed):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())  # imports much, before anything is watched
    rank = dist.init(timeout_s=120).rank

    def prepare(world):
        same = SameBits(model, optimizer, micro_batches=4, group=world.group, probe=False)

        def train_step(step):
            how, when = hangs.get(rank, ("", -1))
            if is_disturbed and step == when:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    time.sleep(10_000)
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            optimizer.step()

        return train_step

    resilient.run(prepare, model, optimizer, total=10)
    print(dist.world().size, flush=True)
    dist.shutdown()
    return fingerprint(model, optimizer)

found = train(True)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train(False) == found, "other bits than on one rank that nothing disturbs"
"""


def _run(tmp_path, num_ranks, *argv, hangs):
    script = tmp_path / "train.py"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", str(num_ranks), *argv, "--on-stall", "replace",
        "--run-dir", str(tmp_path / "run"), str(script), *hangs,
    )  # fmt: skip
    return done, read_json(tmp_path / "run" / "report.json")


def test_a_frozen_rank_is_ended_and_its_step_is_repeated(tmp_path):
    done, report = _run(
        tmp_path, 3, "--on-loss", "shrink", "--stall-timeout", "10", hangs=["1:stop:5"]
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 hangs (frozen_process); ending it" in done.stderr
    assert "rank 1 is lost; continuing with ranks 0 and 2" in done.stderr
    assert "continued without rank 1 (frozen_process), with 2 of 3 ranks in " in done.stderr
    assert "step 5 repeated, 0 steps lost" in done.stderr
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9, 0]
    (continued,) = report["continuations"]
    assert continued["ended_for"] == {"1": "frozen_process"}
    assert {one["kind"] for one in report["incidents"]} == {"stall"}
    verdicts = [(one["verdict"], one["recovered"]) for one in report["incidents"]]
    # One for both the hang and the loss.
    assert [known for one, known in verdicts if one["culprit_ranks"] == [1]] == [True]


def test_a_rank_is_frozen_while_another_one_dies(tmp_path):
    """The others wait for it in the meeting after that loss."""
    done, report = _run(
        tmp_path, 4, "--on-loss", "shrink", "--stall-timeout", "10", hangs=["1:stop:5", "2:kill:5"]
    )
    assert done.returncode == 0, done.stderr
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9, -9, 0]
    assert report["continuations"][-1]["lost_ranks"] == [1, 2]


def test_ranks_that_hang_one_after_another_are_ended_one_after_another(tmp_path):
    done, report = _run(
        tmp_path, 4, "--on-loss", "shrink", "--stall-timeout", "10",
        hangs=["1:sleep:3", "0:stop:6", "3:stop:6"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    causes = {}
    for one in report["continuations"]:
        causes |= one["ended_for"]
    assert causes == {"1": "host_hang", "0": "frozen_process", "3": "frozen_process"}
    assert {one["kind"] for one in report["incidents"]} == {"stall"}


def test_a_hang_that_cannot_be_survived_ends_the_job(tmp_path):
    done, report = _run(tmp_path, 2, "--stall-timeout", "10", hangs=["1:stop:5"])
    assert done.returncode == 3, done.stderr
    assert "--on-stall replace works as restart without --on-loss shrink" in done.stderr
    assert (
        "no rank is ended: neither --on-loss shrink nor --on-loss replace is given" in done.stderr
    )
    assert report["ended_by"] == "stall"
