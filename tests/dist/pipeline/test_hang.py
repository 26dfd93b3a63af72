"""A hang inside a pipeline is explained by the action that never came."""

import pytest

from echelon.analysis.finding import Confidence
from tests.analysis.imagined_job import Job
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_JOB = """
import threading
import torch
import echelon.dist as dist
from echelon.dist.pipeline import Pipeline, Stage

class Layer(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.calls = rank, 0
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        self.calls += 1
        if self.rank == 2 and self.calls == 12:
            threading.Event().wait()
        return self.linear(x)

world = dist.init(timeout_s=60)
stage = Stage(Layer(world.rank), index=world.rank, num_stages=4)
pipe = Pipeline([stage], schedule="1f1b", num_microbatches=8, loss_fn=lambda y, t: (y - t).sum())
for step in range(100):
    pipe.step(torch.ones(8, 8), torch.ones(8, 8))
"""


def test_the_verdict_names_the_action_the_line_and_who_waits(tmp_path):
    script = tmp_path / "model.py"
    script.write_text(_JOB)
    done = run_echelon(
        "run", "--nproc-per-node", "4", "--stall-timeout", "5", "--on-stall", "stop",
        "--run-dir", str(tmp_path / "run"), str(script),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    verdict = read_json(tmp_path / "run/dump/latest/verdict.json")["verdict"]
    assert verdict["cause"] == "host_hang"
    assert verdict["culprit_ranks"] == [2]
    assert verdict["fallout_ranks"] == [0, 1, 3]
    assert verdict["summary"] == (
        "rank 2 never ran 2F3: it is in compute at model.py:16 in forward, in 2F3; "
        "rank 3 waits in RECV_F, ranks 0 and 1 are fallout"
    )
    assert "rank 3: 3F3 waits in RECV_F for 2F3 of rank 2" in verdict["evidence"]
    assert "rank 2 never ran 2F3" in done.stderr


def _job(*waits):
    job = Job(4)
    for rank in range(4):
        job[rank].all_reduce()
    for rank, detail in waits:
        job[rank].span("pipeline", detail=detail)
    return job


def test_waits_are_followed_to_their_end():
    job = _job(
        (0, "0B0 waits in RECV_B for 1B0 of rank 1"), (1, "1B0 waits in RECV_B for 2B0 of rank 2"),
        (3, "3F2 waits in RECV_F for 2F2 of rank 2"),
    )  # fmt: skip
    job[2].span("compute", detail="2B0").stands()
    verdict = job.report().verdict
    assert verdict.culprit_ranks == (2,)
    assert verdict.fallout_ranks == (0, 1, 3)
    assert verdict.confidence is Confidence.CERTAIN
    assert "it is in compute at tokenize.py:88 in fetch, in 2B0" in verdict.summary


def test_a_first_rank_without_data_is_data_starvation():
    job = _job(*[(r, f"{r}F0 waits in RECV_F for {r - 1}F0 of rank {r - 1}") for r in (1, 2, 3)])
    job[0].span("data_wait").stands()
    verdict = job.report().verdict
    assert (verdict.cause.value, verdict.culprit_ranks) == ("data_starvation", (0,))
    assert verdict.summary.startswith("rank 0 never ran 0F0: it has waited")


def test_a_dead_rank_comes_before_those_that_wait_for_it():
    job = _job((0, "0B0 waits in RECV_B for 1B0 of rank 1"))
    job[1].exited(-9)
    assert job.report("failure").verdict.cause.value == "dead_process"


@pytest.mark.parametrize(
    "detail",
    ["", "x" * 5000, "1F0 waits in RECV_F for 0F0 of rank 99", "0F0 waits in RECV_F for rank -1"],
)
def test_strange_details_say_nothing(detail):
    assert _job((1, detail)).report("signal").healthy


def test_a_wait_that_has_just_begun_is_no_hang():
    job = Job(2)
    for rank in (0, 1):
        job[rank].all_reduce()
    job[1].span("pipeline", detail="1F0 waits in RECV_F for 0F0 of rank 0")
    job.snapshot_s = 1.0
    assert job.report("signal").healthy
    job.snapshot_s = 30.0
    assert job.report("signal").verdict.culprit_ranks == (0,)
