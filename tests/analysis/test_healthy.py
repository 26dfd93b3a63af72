"""Healthy means healthy: what looks odd in a job that is well raises no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from imagined_job import Job

from echelon.analysis.finding import Report

Story = Callable[[], Report]


def finished() -> Report:
    job = Job(4).train(5)
    for order, rank in enumerate(job.ranks):
        rank.closed = True
        rank.exited(0, order=order)
    return job.report("")


def running_rings() -> Report:
    """Looked at in the middle of a step: some are inside, one computes, one waits for data."""
    job = Job(4).train(5)
    job.snapshot_s = 0.2
    job[0].all_reduce(inside=True)
    job[1].all_reduce(inside=True)
    job[2].span("compute")
    job[3].span("data_wait")
    return job.report("")


def snapshots_a_little_apart() -> Report:
    job = Job(4).train(5)
    job.snapshot_s = 0.1
    job[0].all_reduce().all_reduce().all_reduce(inside=True)
    for rank in job.others(0):
        rank.all_reduce(inside=True)
    return job.report("")


def ring_tails_of_different_length() -> Report:
    job = Job(4)
    for _ in range(30):
        for rank in job.ranks:
            for _ in range(3 if rank.rank < 2 else 1):
                rank.all_reduce(
                    group=f"tp{rank.rank // 2}", ranks=(0, 1) if rank.rank < 2 else (2, 3)
                )
            rank.all_reduce()
    for rank in job.ranks:
        rank.operations = rank.operations[-20 - rank.rank :]
    return job.report("")


def a_pipeline_in_flight() -> Report:
    job = Job(3).train(1)
    job.snapshot_s = 0.05
    job[0].send(1).send(1).send(1, inside=True)
    job[1].recv(0).send(2).recv(0)
    job[2].recv(1).recv(1, inside=True)
    return job.report("")


def eager_sends_run_ahead() -> Report:
    job = Job(2).train(1)
    job.snapshot_s = 1.0
    for _ in range(5):
        job[0].send(1)
    job[1].recv(0).recv(0)
    return job.report("")


def symmetric_batch_p2p() -> Report:
    job = Job(4).train(1)
    for rank in job.ranks:
        peer = rank.rank ^ 1
        rank.send(peer).recv(peer)
    return job.report("")


def uneven_splits_that_fit() -> Report:
    job = Job(2).train(1)
    job[0].call("all_to_all", splits=((1, 3), (1, 2)), shape=(4,))
    job[1].call("all_to_all", splits=((2, 5), (3, 5)), shape=(7,))
    return job.train(1).report("")


def rooted_operations() -> Report:
    job = Job(3).train(1)
    for rank in job.ranks:
        rank.call("gather", root=1, shape=(4,)).call("scatter", root=1, shape=(4,))
    return job.train(1).report("")


def steps_counted_differently_on_rank_0() -> Report:
    """Rank 0 calls step() once before the others do, and stays one ahead all along."""
    job = Job(3)
    job[0].step()
    return job.train(6).report("")


def somebody_asked_for_a_snapshot() -> Report:
    job = Job(4).train(5)
    job.snapshot_s = 0.3
    for rank in job.ranks:
        rank.all_reduce(inside=True)
    return job.report("signal")


def ranks_that_share_too_few_cores() -> Report:
    """One host: each step another one of two ranks waits for a core; the others share that host."""
    job = Job(4)
    for number in range(60):
        for rank in job.ranks:
            rank.wait(0.009 if rank.rank == number % 2 else 0.004)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job.report("")


def a_few_late_arrivals() -> Report:
    job = Job(4)
    for number in range(60):
        for rank in job.ranks:
            rank.wait(0.006 if rank.rank == number % 4 else 0.004)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job.report("")


def one_rank_alone() -> Report:
    return Job(1).train(4).report("")


def nothing_recorded_at_all() -> Report:
    return Job(2).report("")


def a_survived_mismatch() -> Report:
    """Looked at in a step: the mismatch of three steps ago does not count any more."""
    job = Job(4).train(2)
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        rank.all_reduce(shape=shape, group="trial", failed="CollectiveMismatchError: differ")
    job.train(3)
    job.snapshot_s = 0.2
    job[0].all_reduce(inside=True)
    return job.report("")


def finished_after_a_survived_mismatch() -> Report:
    job = Job(4).train(2)
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        rank.all_reduce(shape=shape, group="trial", failed="CollectiveMismatchError: differ")
    for order, rank in enumerate(job.train(3).ranks):
        rank.closed = True
        rank.exited(0, order=order)
    return job.report("")


def asked_to_end_after_a_survived_mismatch() -> Report:
    job = Job(4).train(2)
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        rank.all_reduce(shape=shape, group="trial", failed="CollectiveMismatchError: differ")
    for order, rank in enumerate(job.train(3).ranks):
        rank.exited(-15, order=order)
    return job.report("signal")


def finished_after_a_caught_timeout() -> Report:
    job = Job(4).train(2)
    for rank in job.others(2):
        rank.all_reduce(group="trial", failed="CollectiveTimeoutError: missing: 2")
    for order, rank in enumerate(job.train(3).ranks):
        rank.exited(0, order=order)
    return job.report("")


STORIES = [
    finished,
    running_rings,
    snapshots_a_little_apart,
    ring_tails_of_different_length,
    a_pipeline_in_flight,
    eager_sends_run_ahead,
    symmetric_batch_p2p,
    uneven_splits_that_fit,
    rooted_operations,
    steps_counted_differently_on_rank_0,
    somebody_asked_for_a_snapshot,
    ranks_that_share_too_few_cores,
    a_few_late_arrivals,
    one_rank_alone,
    nothing_recorded_at_all,
    a_survived_mismatch,
    finished_after_a_survived_mismatch,
    asked_to_end_after_a_survived_mismatch,
    finished_after_a_caught_timeout,
]


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_no_alarm(tell: Story) -> None:
    report = tell()
    assert report.healthy, report.verdict
    assert report.exit_code == 0


def test_steps_counted_differently_do_not_hide_a_hang() -> None:
    job = Job(3)
    job[0].step()
    job.train(6)
    for rank in job.others(1):
        rank.all_reduce(inside=True)
    verdict = job.report().verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("host_hang", (1,))


def test_a_mild_straggler_is_a_note_and_no_verdict() -> None:
    job = Job(4)
    for _ in range(60):
        for rank in job.ranks:
            rank.wait(0.0112 if rank.rank == 2 else 0.01)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    report = job.report("")
    assert report.healthy
    assert report.exit_code == 0
    [note] = report.to_json()["findings"]
    assert (note["cause"], note["culprit_ranks"], note["severity"]) == ("straggler", [2], "info")
