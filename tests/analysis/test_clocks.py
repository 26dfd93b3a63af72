"""Hosts whose clocks no longer lie where they were measured: made-up drift and steps."""

from __future__ import annotations

import pytest

from echelon.analysis.evidence.picture import take_picture
from echelon.analysis.evidence.timing import timing_of
from tests.analysis.imagined_job import Job

ERROR_NS = 50_000
STAMPS = ("created_mono_ns", "started_mono_ns", "completed_mono_ns")


def two_hosts(steps: int = 40, late_s: float = 0.0) -> Job:
    """Let four ranks train on two hosts whose clocks agree; rank 2 is late by `late_s`."""
    job = Job(4)
    for rank in job.ranks:
        rank.on_host("ab"[rank.rank // 2], error_ns=ERROR_NS * (rank.rank // 2))
    for _ in range(steps):
        job[2].wait(late_s)
        for rank in job.ranks:
            rank.step().all_reduce(took_s=0.002 + (0 if rank.rank == 2 else late_s))
    return job


def turn_clock(job: Job, drift: float = 0.0, step_s: float = 0.0) -> Job:
    """Let host b's clock run apart since the start, or step half-way."""
    half = len(job[2].operations) // 2
    for rank in (job[2], job[3]):
        begun_ns = rank.operations[0]["created_mono_ns"]
        for number, row in enumerate(rank.operations):
            apart_ns = int((row["created_mono_ns"] - begun_ns) * drift)
            apart_ns += int(step_s * 1e9) if number >= half else 0
            for name in STAMPS:
                row[name] += apart_ns
    return job


def lags_ms(job: Job) -> list[float]:
    ranks = sorted(timing_of(take_picture(job.evidence(""))).ranks, key=lambda rank: rank.rank)
    return [1e3 * rank.mean_lag_s for rank in ranks]


def test_a_late_rank_on_another_host_is_late_by_its_stamps():
    assert lags_ms(two_hosts(late_s=0.01)) == pytest.approx([0, 0, 10, 0], abs=0.2)


@pytest.mark.parametrize(
    "turned",
    [{"drift": 0.2}, {"drift": -0.2}, {"step_s": 3.0}, {"step_s": -3.0}],
    ids=["gains", "loses", "steps forward", "steps back"],
)
def test_a_clock_that_runs_away_makes_no_rank_late(turned):
    assert max(lags_ms(turn_clock(two_hosts(), **turned))) < 0.2


@pytest.mark.parametrize("turned", [{"drift": 0.2}, {"step_s": 3.0}, {"step_s": -3.0}], ids=str)
def test_a_late_rank_is_still_found_by_how_little_it_waits(turned):
    lags = lags_ms(turn_clock(two_hosts(late_s=0.01), **turned))
    assert lags[2] == pytest.approx(10, abs=0.2)
    assert max(lags[0], lags[1], lags[3]) < 0.2


@pytest.mark.parametrize("turned", [{"drift": 0.2}, {"step_s": 3.0}, {"step_s": -3.0}], ids=str)
def test_a_clock_that_runs_away_raises_no_alarm(turned):
    report = turn_clock(two_hosts(), **turned).report("")
    assert not report.findings, report.findings


def test_ranks_of_one_host_keep_their_clock():
    """Stamps of one clock that contradict each other say something else: they are left alone."""
    job = turn_clock(two_hosts(), step_s=3.0)
    for rank in job.ranks:
        rank.identity.update(boot_id="one-host", clock_error_ns=0)
    assert max(lags_ms(job)) > 1000
