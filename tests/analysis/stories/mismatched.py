"""Ranks call one operation with different arguments."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story

MISMATCH = "CollectiveMismatchError: ranks differ"


@story("op_mismatch", [2], "failure", confidence="certain")
def another_operation() -> Job:
    job = Job(4).train(3)
    for rank in job.others(2):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed=MISMATCH)
    job[2].step().call("broadcast", root=0, shape=(64,), site="break.py:5 f", failed=MISMATCH)
    return job


@story("shape_mismatch", [0], confidence="certain")
def another_shape_on_rank_0() -> Job:
    job = Job(4).train(3)
    for rank in job.others(0):
        rank.all_reduce(shape=(64,), inside=True)
    job[0].all_reduce(shape=(65,), inside=True)
    return job


@story("dtype_mismatch", [3], confidence="certain")
def another_dtype() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(dtype="float64" if rank.rank == 3 else "float32", inside=True)
    return job


@story("reduce_op_mismatch", [1], confidence="certain")
def another_reduce_op() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(reduce_op="max" if rank.rank == 1 else "sum", inside=True)
    return job


@story("root_mismatch", [1, 2], confidence="certain")
def another_root_on_two_of_five() -> Job:
    job = Job(5).train(2)
    for rank in job.ranks:
        rank.call("broadcast", root=1 if rank.rank in (1, 2) else 0, inside=True)
    return job


@story("shape_mismatch", [0, 1], confidence="likely")
def a_tie_names_both_sides() -> Job:
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.all_reduce(shape=(8 + rank.rank,), inside=True)
    return job


@story("shape_mismatch", [2], "failure", confidence="likely")
def seen_by_two_before_the_others_came() -> Job:
    """The mismatch is raised as soon as two ranks differ; who is odd shows in their past."""
    job = Job(4).train(3)
    said = (
        "CollectiveMismatchError: all_reduce #9: rank 2 passed float32[7], the others float32[64]"
    )
    job[0].all_reduce(shape=(64,), site="train.py:20 backward", failed=said)
    job[2].all_reduce(shape=(7,), site="train.py:20 backward", failed=said)
    return job


@story("shape_mismatch", [3], confidence="certain")
def the_earliest_difference_is_the_root() -> Job:
    job = Job(4).train(1)
    for rank in job.ranks:
        rank.all_reduce(shape=(9 if rank.rank == 3 else 8,))
    for rank in job.ranks:
        rank.all_reduce(shape=(9 if rank.rank == 1 else 8,), inside=True)
    return job


@story("split_mismatch", [2], confidence="certain")
def splits_that_do_not_fit() -> Job:
    job = Job(3).train(1)
    for rank in job.ranks:
        sends = (2, 2, 2) if rank.rank != 2 else (2, 3, 2)
        rank.call("all_to_all", splits=(sends, (2, 2, 2)), shape=None, inside=True)
    return job


@story("dtype_mismatch", [2], "failure", confidence="certain")
def a_mismatch_explains_the_exits() -> Job:
    job = Job(4).train(2)
    for order, rank in enumerate(job.ranks):
        dtype = "float16" if rank.rank == 2 else "float32"
        rank.all_reduce(dtype=dtype, failed="CollectiveMismatchError: dtypes differ")
        rank.raised("echelon.errors.CollectiveMismatchError", "dtypes differ", order=order)
    return job


@story("dtype_mismatch", [0, 1], confidence="likely")
def a_receive_of_another_type_than_the_send() -> Job:
    job = Job(2).train(1)
    job[0].send(1, dtype="float32", inside=True)
    job[1].recv(0, dtype="float64", inside=True)
    return job
