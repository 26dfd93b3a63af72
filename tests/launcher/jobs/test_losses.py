"""Launched jobs that continue without a rank that is killed, and those that cannot."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_TRAINING = """
import os, signal
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits, fingerprint

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def train(is_disturbed):
    group = dist.init(timeout_s=60)
    rank = group.rank
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(world):
        same = SameBits(model, optimizer, micro_batches=3, group=world.group, probe=False)

        def train_step(step):
            def loss_of(number):
                if is_disturbed and rank == 1 and step == 5:
                    if attempt == 0:
                        raise ValueError("a defect of the program")
                    os.kill(os.getpid(), signal.SIGKILL)
                return model(torch.randn(2, 6)).square().sum()
            same.backward(step, loss_of)
            optimizer.step()

        return train_step

    resilient.run(prepare, model, optimizer, total=10)
    print(fingerprint(model, optimizer), dist.world().size, flush=True)
    dist.shutdown()
    return fingerprint(model, optimizer)

found = train(True)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train(False) == found, "other bits than on one rank that nothing disturbs"
"""


def test_an_error_ends_the_attempt_and_a_kill_does_not(tmp_path):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--on-loss", "shrink", "--max-restarts", "1",
        "--run-dir", str(run_dir), str(script),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stdout
    assert "rank 1 is lost; continuing with rank 0" in done.stderr
    assert "continued with 1 of 2 ranks in " in done.stderr
    assert "step 5 repeated, 0 steps lost" in done.stderr
    assert "1 of 2 ranks finished successfully" in done.stderr
    report = read_json(run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"], report["attempts"]) == ("worker", 0, 2)
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9]
    (continued,) = report["continuations"]
    assert continued.pop("seconds") >= 0
    assert continued == {
        "attempt": 1, "epoch": 1, "lost_ranks": [1], "joined_ranks": [], "ended_for": {},
        "num_ranks": 1, "step": 5, "repeated": True, "steps_lost": 0,
    }  # fmt: skip
    error, kill = report["incidents"]
    assert (error["verdict"]["cause"], error["verdict"]["culprit_ranks"]) == ("exception", [1])
    assert (kill["verdict"]["cause"], kill["verdict"]["culprit_ranks"]) == ("dead_process", [1])
    assert (kill["attempt"], kill["recovered"]) == (1, True)


_TWO_TROUBLES = """
import os, signal, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient
from echelon.train.same_bits import SameBits

rank = dist.init(timeout_s=60).rank
first_incident = Path(os.environ["ECHELON_RANK_DIR"]).parents[1] / "dump/incident_0"
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def prepare(world):
    same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

    def train_step(step):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2 and first_incident.exists():
            raise ValueError("a defect of the program")
        same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
        optimizer.step()
        time.sleep(0.01)

    return train_step

resilient.run(prepare, model, optimizer, total=12_000)
"""


@pytest.mark.slow
def test_a_failure_after_a_loss_is_explained_by_the_rank_that_fails(tmp_path):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TWO_TROUBLES)
    done = run_echelon(
        "run", "--nproc-per-node", "3", "--on-loss", "shrink",
        "--run-dir", str(run_dir), str(script),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "echelon: loss: rank 1 was killed by SIGKILL; collecting" in done.stderr
    assert "failure: rank 1" not in done.stderr
    report = read_json(run_dir / "report.json")
    assert [rank["exit_code"] for rank in report["ranks"]][1:] == [-9, 1]
    assert [one["lost_ranks"] for one in report["continuations"]] == [[1]]
    loss, failure = report["incidents"]
    assert (loss["verdict"]["cause"], loss["verdict"]["culprit_ranks"]) == ("dead_process", [1])
    verdict = failure["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("exception", [2]), done.stderr
    assert verdict["confidence"] == "certain"
    assert 1 not in failure["victims"]["failed"]
    line = "rank 1 was lost earlier, and the job continued without it"
    assert line in verdict["evidence"]
    told = read_json(run_dir / "dump" / "incident_1" / "incident.json")
    assert told["lost_earlier"] == [[1, 1]]


@pytest.mark.parametrize("kind", ["unprotected", "too few"])
def test_a_loss_that_cannot_be_survived_is_a_failure_as_any_other(tmp_path, kind):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    register = """
        from echelon.recorder.continuation import Standing, State, note_standing
        note_standing(Standing(state=State.PROTECTED))
    """
    script.write_text(
        textwrap.dedent(register if kind == "too few" else "")
        + textwrap.dedent(
            """
            import os, signal
            import numpy as np
            import echelon.dist as dist
            world = dist.init(timeout_s=60)
            world.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
            """
        )
    )
    done = run_echelon(
        "run", "--nproc-per-node", "2", "--on-loss", "shrink", "--min-ranks", "2",
        "--run-dir", str(run_dir), str(script),
    )  # fmt: skip
    assert done.returncode == 137, done.stderr
    why = {
        "unprotected": "rank 1 is not in resilient.run",
        "too few": "1 rank is left, below --min-ranks 2",
    }
    assert f"cannot continue without rank 1: {why[kind]}" in done.stderr
    report = read_json(run_dir / "report.json")
    assert report["continuations"] == []
    assert report["incidents"][0]["verdict"]["culprit_ranks"] == [1]
