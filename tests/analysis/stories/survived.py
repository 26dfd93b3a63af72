"""Errors that a program caught: most of these jobs continued, and something else ended them."""

from __future__ import annotations

from dataclasses import replace

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story

WRONG_SHAPE = "CollectiveMismatchError: all_reduce #0 in group 'trial': shapes differ"
_TRACE = """Traceback (most recent call last):
  File "/home/user/job/train.py", line 30, in trial
echelon.errors.CollectiveMismatchError: all_reduce #6 in group 'world' (4 ranks): rank 2 called

"""
CONTEXT = f"{_TRACE}During handling of the above exception, another exception occurred:\n\n"
CAUSE = f"{_TRACE}The above exception was the direct cause of the following exception:\n\n"


def mismatch_in_a_group_of_its_own(job: Job) -> Job:
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        rank.all_reduce(shape=shape, group="trial", failed=WRONG_SHAPE, site="train.py:30 trial")
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_steps_after_a_caught_mismatch() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    job[3].exited(7)
    for rank in job.others(3):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed="PeerLostError")
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_several_caught_mismatches_of_a_program_without_steps() -> Job:
    job = Job(4)
    for kind in range(3):
        for rank in job.ranks:
            dtype = "float64" if rank.rank == kind else "float32"
            rank.all_reduce(dtype=dtype, group=f"trial {kind}", failed=WRONG_SHAPE)
        for rank in job.ranks:
            rank.all_reduce(shape=(64,), site="train.py:20 backward")
            rank.all_reduce(shape=(1,), site="train.py:25 log_loss")
    job[3].exited(7)
    for rank in job.others(3):
        rank.all_reduce(shape=(64,), site="train.py:20 backward", failed="PeerLostError")
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_a_caught_mismatch_in_the_world() -> Job:
    """The world's group is broken since; the ranks go on in a new group."""
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(shape=(7 if rank.rank == 2 else 8,), failed=WRONG_SHAPE)
    for _ in range(3):
        for rank in job.ranks:
            rank.step().all_reduce(shape=(64,), group="again", site="train.py:20 backward")
    job[3].exited(7)
    for rank in job.others(3):
        rank.all_reduce(shape=(64,), group="again", failed="PeerLostError: rank 3")
    return job


@story("host_hang", [1], confidence="certain")
def a_hang_steps_after_a_caught_mismatch() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    job[1].stands()
    for rank in job.others(1):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_steps_after_caught_splits_that_do_not_fit() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        sends = (2, 3, 2, 2) if rank.rank == 2 else (2, 2, 2, 2)
        splits = (sends, (2, 2, 2, 2))
        rank.call("all_to_all", splits=splits, shape=None, group="trial", failed=WRONG_SHAPE)
    job.train(3)[3].exited(7)
    for rank in job.others(3):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed="PeerLostError")
    return job


@story(
    "shape_mismatch",
    [2],
    "failure",
    confidence="certain",
    also=(("dead_process", (0,)), ("dead_process", (1, 2, 3))),
)
def a_mismatch_with_barriers_in_the_clean_up() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    for order, rank in enumerate(job.ranks):
        rank.barrier(site="train.py:70 finish").barrier(site="train.py:72 finish")
        rank.exited(1, order=order)
    return job


@story(
    "shape_mismatch",
    [2],
    "failure",
    confidence="certain",
    also=(("dead_process", (0,)), ("dead_process", (1, 2, 3))),
)
def a_mismatch_after_which_one_status_is_gathered() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    for order, rank in enumerate(job.ranks):
        rank.all_reduce(shape=(1,), site="train.py:70 finish").barrier(site="train.py:72 finish")
        rank.exited(1, order=order)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain")
def a_mismatch_raised_again_after_a_long_clean_up() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    for order, rank in enumerate(job.ranks):
        rank.raised("echelon.errors.CollectiveMismatchError", "shapes differ", order=order)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (3,)),))
def a_mismatch_after_which_one_member_did_not_go_on() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3, but=(3,))
    job[3].exited(1)
    return job


def world_breaks(job: Job, odd: int = 2) -> Job:
    """Let the world's group break, as it is recorded: each later call raises the error again."""
    first = "CollectiveMismatchError: all_reduce #6 in group 'world' (4 ranks): rank 2 called"
    for rank in job.ranks:
        rank.all_reduce(
            shape=(7 if rank.rank == odd else 8,), failed=first, site="train.py:30 trial"
        )
    return job


def _train_in(job: Job, group: str, steps: int, marks: bool = True) -> Job:
    for _ in range(steps):
        for rank in job.ranks:
            if marks:
                rank.step()
            rank.all_reduce(shape=(64,), group=group, site="train.py:20 backward")
            rank.all_reduce(shape=(1,), group=group, site="train.py:25 log_loss")
    return job


@story("host_hang", [1], confidence="certain")
def a_hang_steps_after_a_caught_mismatch_in_the_world() -> Job:
    job = _train_in(world_breaks(Job(4).train(2)), "again", 3)
    job[1].stands()
    for rank in job.others(1):
        rank.step().all_reduce(group="again", site="train.py:20 backward", inside=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_in_a_program_that_tries_the_broken_group_again_and_again() -> Job:
    job = world_breaks(Job(4).train(2))
    for _ in range(4):
        for rank in job.ranks:
            rank.step().all_reduce(group="world", failed=WRONG_SHAPE, site="train.py:30 trial")
            rank.all_reduce(group="again", site="train.py:20 backward")
    for rank in job.ranks:
        rank.all_reduce(group="world", failed=WRONG_SHAPE, site="train.py:30 trial")
    job[3].exited(7)
    for rank in job.others(3):
        rank.all_reduce(group="again", failed="PeerLostError", site="train.py:20 backward")
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_of_a_rank_whose_log_holds_the_caught_mismatch() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    trace = (
        'Traceback (most recent call last):\n  File "/home/user/job/train.py", line 30, in trial\n'
    )
    said = "echelon.errors.CollectiveMismatchError: all_reduce #0 in group 'trial': shapes differ"
    for rank in job.ranks:
        rank.host["stderr_tail"] = f"{trace}{said}\n"
    job[3].exited(7)
    for order, rank in enumerate(job.others(3), 1):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed="PeerLostError")
        rank.raised(
            "echelon.errors.PeerLostError", "all_reduce #15 in group 'world': rank 3", order=order
        )
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_of_a_program_that_trains_on_inside_its_handler() -> Job:
    """Each later error carries the caught one as its context."""
    job = _train_in(world_breaks(Job(4).train(2)), "again", 3)
    job[3].exited(7)
    for order, rank in enumerate(job.others(3), 1):
        rank.step().all_reduce(group="again", failed="PeerLostError: rank 3")
        rank.raised(
            "echelon.errors.PeerLostError", "all_reduce #6 in group 'again': rank 3", order=order
        )
        assert rank.words is not None
        rank.words = replace(rank.words, traceback=CONTEXT + rank.words.traceback)
    return job


@story(
    "shape_mismatch",
    [2],
    "failure",
    confidence="certain",
    also=(("exception", (0,)), ("exception", (1, 2, 3))),
)
def a_mismatch_that_an_exception_gives_as_its_cause() -> Job:
    job = _train_in(world_breaks(Job(4).train(2)), "again", 3)
    for order, rank in enumerate(job.ranks):
        rank.raised("builtins.RuntimeError", "the training failed", order=order)
        assert rank.words is not None
        rank.words = replace(rank.words, traceback=CAUSE + rank.words.traceback)
    return job


@story(
    "shape_mismatch",
    [2],
    "failure",
    confidence="certain",
    also=(("dead_process", (0,)), ("dead_process", (1, 3))),
)
def a_mismatch_that_one_rank_died_of_while_another_caught_it() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    job[2].raised("echelon.errors.CollectiveMismatchError", "shapes differ")
    for rank in job.others(2):
        for _ in range(3):
            rank.step().all_reduce(group="rest", ranks=(0, 1, 3), site="train.py:20 backward")
        rank.all_reduce(shape=(64,), failed="PeerLostError: rank 2")
        rank.exited(1, order=1)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain")
def a_mismatch_of_which_only_standard_error_tells() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(2)
    said = "echelon.errors.CollectiveMismatchError: all_reduce #0 in group 'trial': shapes differ"
    trace = 'Traceback (most recent call last):\n  File "/home/user/job/train.py", line 9, in f\n'
    for order, rank in enumerate(job.ranks):
        rank.exited(1, order=order, stderr_tail=f"{trace}{said}\n")
    return job


@story("shape_mismatch", [2], "failure", confidence="certain")
def a_mismatch_of_a_work_that_is_waited_for_steps_later() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        rank.all_reduce(shape=shape, group="trial", failed=WRONG_SHAPE, site="train.py:30 trial")
    job.train(2)
    job[0].raised(
        "echelon.errors.CollectiveMismatchError", "all_reduce #0 in group 'trial': shapes differ"
    )
    for order, rank in enumerate(job.others(0), 1):
        rank.exited(-15, order=order, by_agent=True)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain")
def a_mismatch_that_ended_a_thread() -> Job:
    """The program continued without that thread until it needed what the thread makes."""
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    job[2].raised("echelon.errors.CollectiveMismatchError", "all_reduce #0 in group 'trial'")
    assert job[2].words is not None
    job[2].words = replace(job[2].words, thread="prefetch")
    job[2].host.update(alive=True, exit_code=None)
    return job


@story("shape_mismatch", [1], "failure", confidence="certain")
def a_second_mismatch_after_a_survived_one() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(3)
    said = "CollectiveMismatchError: all_reduce #15 in group 'world': rank 1 called"
    for order, rank in enumerate(job.ranks):
        shape = (63,) if rank.rank == 1 else (64,)
        rank.step().all_reduce(shape=shape, site="train.py:20 backward", failed=said)
        words = said.partition(": ")[2]
        rank.raised("echelon.errors.CollectiveMismatchError", words, order=order)
    return job


@story("shape_mismatch", [2], confidence="certain")
def a_mismatch_in_which_one_member_is_still_inside() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        shape = (7,) if rank.rank == 2 else (8,)
        how = {"inside": True} if rank.rank == 0 else {"failed": WRONG_SHAPE}
        rank.all_reduce(shape=shape, group="trial", site="train.py:30 trial", **how)
    return job.train(3)


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (0,)),))
def a_mismatch_after_which_a_program_without_steps_saves_and_leaves() -> Job:
    job = Job(4)
    for _ in range(4):
        for rank in job.ranks:
            rank.all_reduce(shape=(64,), site="train.py:20 backward")
            rank.all_reduce(shape=(1,), site="train.py:25 log_loss")
    mismatch_in_a_group_of_its_own(job)
    for order, rank in enumerate(job.ranks):
        for _ in range(6):
            rank.all_reduce(shape=(9,), site="save.py:12 save")
        rank.all_reduce(shape=(1,), site="save.py:17 save").barrier(site="save.py:20 save")
        rank.exited(1, order=order, by_agent=order > 0)
    return job


@story(
    "shape_mismatch",
    [2],
    "failure",
    confidence="certain",
    also=(("dead_process", (0,)), ("dead_process", (1, 2, 3))),
)
def a_mismatch_after_which_all_ranks_finish_and_leave_with_the_same_code() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2)).train(4)
    for order, rank in enumerate(job.ranks):
        rank.exited(5, order=order)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (0,)),))
def a_mismatch_followed_by_barriers_in_many_steps() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    for _ in range(4):
        for rank in job.ranks:
            rank.step().barrier(site="train.py:70 finish")
    job[0].exited(3)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_a_skipped_call_that_the_program_survived() -> Job:
    """Rank 2 left a call out of a group of its own, and the next call did not match."""
    job = Job(4).train(2)
    for number in range(4):
        for rank in job.ranks:
            if number != 1 or rank.rank != 2:
                rank.step().all_reduce(group="trial", site="train.py:30 trial")
    for rank in job.ranks:
        shape = (4, 4) if rank.rank != 2 else (1,)
        rank.all_reduce(shape=shape, group="trial", failed=WRONG_SHAPE)
    job.train(4)[3].exited(7)
    for rank in job.others(3):
        rank.step().all_reduce(shape=(64,), site="train.py:20 backward", failed="PeerLostError")
    return job
