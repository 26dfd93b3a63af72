"""A rank leaves a collective out, or makes one too many: the ranks' streams slip."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


def _skip(*, buckets: tuple[int, ...], skipped: int, ranks: int = 4, odd: int = 2) -> Job:
    """Let `odd` leave a bucket of the fourth step out, and all go on until they differ."""
    job = Job(ranks)
    streams: dict[int, list[tuple[int, tuple[int, ...]]]] = {r: [] for r in range(ranks)}
    for rank in range(ranks):
        for step in range(5):
            for bucket, size in enumerate(buckets):
                if not (rank == odd and step == 3 and bucket == skipped):
                    streams[rank].append((step, (size,)))
    for at in range(max(len(stream) for stream in streams.values())):
        calls = [stream[at] if at < len(stream) else None for stream in streams.values()]
        shapes = {call[1] for call in calls if call}
        stop = len(shapes) > 1 or None in calls
        for rank, call in zip(job.ranks, calls, strict=True):
            if call is not None:
                rank.step(call[0]).all_reduce(
                    shape=call[1], site="train.py:20 backward", inside=stop
                )
        if stop:
            break
    return job


@story("skipped_collective", [2], confidence="certain")
def skips_a_bucket_of_another_size() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=1)


@story("skipped_collective", [2], confidence="certain")
def skips_the_last_bucket() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=2)


@story("skipped_collective", [1], confidence="certain")
def skips_one_of_equal_buckets() -> Job:
    """No signature ever differs: only the step shows it, and one call is short at the end."""
    return _skip(buckets=(64, 64, 64), skipped=1, odd=1)


@story("skipped_collective", [3], confidence="likely")
def leaves_the_loop_for_a_barrier() -> Job:
    job = Job(4)
    for _ in range(6):
        for rank in job.ranks:
            rank.all_reduce(site="train.py:20 backward")
    for rank in job.others(3):
        rank.all_reduce(site="train.py:20 backward", inside=True)
    job[3].barrier(site="train.py:40 main", inside=True)
    return job


@story("skipped_collective", [0], confidence="certain")
def makes_one_call_too_many() -> Job:
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward")
    job[0].all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    for rank in job.others(0):
        rank.all_reduce(shape=(128,), site="train.py:20 backward", inside=True)
    return job


@story("skipped_collective", [1], confidence="likely")
def ends_well_while_the_others_go_on() -> Job:
    job = Job(3).train(3)
    for rank in job.others(1):
        rank.step().all_reduce(shape=(64,), inside=True)
    job[1].closed = True
    job[1].exited(0)
    return job


@story("skipped_collective", [1], confidence="certain")
def of_two_ranks_the_one_with_the_short_step_skipped() -> Job:
    return _skip(buckets=(64, 128, 192), skipped=2, ranks=2, odd=1)


@story("skipped_collective", [1], "failure", "likely")
def of_two_ranks_the_one_that_broke_its_own_habit_skipped() -> Job:
    """No step has another length yet, both stopped inside it: only the order of the calls tells."""
    job = Job(2)
    buckets = (64, 128, 192, 256)
    said = (
        "CollectiveMismatchError: all_reduce #17 in group 'world': rank 0 called a; rank 1 called b"
    )
    for step in range(4):
        for rank in job.ranks:
            rank.step(step)
            for size in buckets:
                rank.all_reduce(shape=(size,), site="train.py:20 average")
            rank.all_reduce(shape=(1,), site="train.py:30 log")
    for rank in job.ranks:
        rank.step(4)
        for size in buckets[:3]:
            rank.all_reduce(shape=(size,), site="train.py:20 average")
    job[0].all_reduce(shape=(256,), site="train.py:20 average", failed=said)
    job[1].all_reduce(shape=(1,), site="train.py:30 log", failed=said)
    return job


def _leaves_the_loader(ranks: int, *, with_ends: bool = True) -> Job:
    """Let the last rank's loader end after six batches: it goes on to what follows the loop."""
    job = Job(ranks)
    for step in range(6):
        for rank in job.ranks:
            rank.step(step).span("data_wait", open_=False)
            rank.all_reduce(shape=(64,), site="train.py:20 backward")
    for rank in job.ranks:
        rank.step(6).span("data_wait", open_=False)
    odd = job[ranks - 1]
    for rank in job.others(odd.rank):
        rank.all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    if with_ends:
        odd.span("data_end", open_=False)
    odd.call("all_gather", shape=(1,), site="train.py:20 backward", inside=True)
    return job


@story("skipped_collective", [1], confidence="likely")
def of_two_ranks_the_one_whose_loader_has_ended_left_the_loop() -> Job:
    return _leaves_the_loader(2)


@story("skipped_collective", [3], confidence="likely")
def the_rank_whose_loader_has_ended_left_the_loop() -> Job:
    return _leaves_the_loader(4)


@story("op_mismatch", [0, 1], confidence="likely")
def of_two_calls_after_equally_many_batches_neither_is_to_blame() -> Job:
    return _leaves_the_loader(2, with_ends=False)


@story("op_mismatch", [0, 1], confidence="likely")
def of_two_ranks_whose_loaders_have_both_ended_neither_is_to_blame() -> Job:
    job = Job(2)
    for step in range(6):
        for rank in job.ranks:
            rank.step(step).span("data_wait", open_=False)
            rank.all_reduce(shape=(64,), site="train.py:20 backward")
    for rank in job.ranks:
        rank.span("data_end", open_=False)
    job[0].all_reduce(shape=(64,), site="train.py:30 finish", inside=True)
    job[1].call("all_gather", shape=(1,), site="train.py:30 finish", inside=True)
    return job
