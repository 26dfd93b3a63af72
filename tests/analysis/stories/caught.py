"""Mismatches that a program caught, in incomplete records and in unusual programs."""

from __future__ import annotations

from dataclasses import replace

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story
from tests.analysis.stories.survived import (
    CONTEXT,
    WRONG_SHAPE,
    mismatch_in_a_group_of_its_own,
    world_breaks,
)

MISMATCH_ERROR = "echelon.errors.CollectiveMismatchError"
LOOP = "train.py:20 backward"
PAIRS = ((0, 1), (0, 1), (2, 3), (2, 3))  # the members of each rank's pair


def _survived(steps: int = 4) -> Job:
    return mismatch_in_a_group_of_its_own(Job(4).train(2)).train(steps)


def _dies(job: Job, dead: int = 3) -> Job:
    job[dead].exited(7)
    for order, rank in enumerate(job.others(dead), 1):
        rank.step().all_reduce(shape=(64,), site=LOOP, failed="PeerLostError: in group 'world'")
        lost = f"all_reduce #99 in group 'world': rank {dead}"
        rank.raised("echelon.errors.PeerLostError", lost, order=order)
    return job


def _rounds(job: Job, number: int, sites: tuple[str, ...] = (LOOP,)) -> Job:
    for _ in range(number):
        for rank in job.ranks:
            for site in sites:
                rank.all_reduce(shape=(64,), site=site)
    return job


def _tries(job: Job, number: int, but_last: bool) -> Job:
    """Let each step catch a mismatch in a group of its own, and train after it, or not at last."""
    for trial in range(number):
        said = f"CollectiveMismatchError: all_reduce #0 in group 't{trial}': shapes differ"
        for rank in job.ranks:
            shape = (7,) if rank.rank == 2 else (8,)
            rank.step().all_reduce(
                shape=shape, group=f"t{trial}", failed=said, site="train.py:30 trial"
            )
            if trial < number - 1 or not but_last:
                rank.all_reduce(shape=(64,), site=LOOP)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_a_mismatch_that_two_rings_have_overwritten() -> Job:
    job = _dies(_survived())
    for rank in (job[0], job[1]):
        rank.operations = rank.operations[8:]
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_a_mismatch_that_one_ring_still_holds() -> Job:
    job = _dies(_survived())
    for rank in job.others(2):
        rank.operations = rank.operations[8:]
    return job


@story("dead_process", [3], "failure", confidence="likely")
def a_death_after_a_caught_mismatch_with_a_record_missing() -> Job:
    return _dies(_survived()).lose(1)


@story("shape_mismatch", [2, 3], "failure", confidence="likely")
def a_mismatch_that_one_of_two_groups_survived() -> Job:
    job = Job(4).train(2)
    for rank in job.ranks:
        odd = PAIRS[rank.rank][1]
        said = f"all_reduce #0 in group 'dp{odd}': rank {odd} passed float32[7]"
        rank.all_reduce(
            shape=(7 if rank.rank == odd else 8,),
            group=f"dp{odd}",
            ranks=PAIRS[rank.rank],
            failed=f"CollectiveMismatchError: {said}",
        )
        for _ in range(3 if odd == 1 else 0):
            rank.step().all_reduce(group="pair", ranks=(0, 1))
        if odd == 3:
            rank.raised(MISMATCH_ERROR, said, order=rank.rank)
    return job


@story("shape_mismatch", [2, 3], "failure", confidence="likely")
def a_second_mismatch_in_another_group_of_the_same_name() -> Job:
    said = "all_reduce #0 in group 'dp' (2 ranks): rank {} called float32[7]"
    job = Job(4).train(2)
    for rank in (job[0], job[1]):
        error = f"CollectiveMismatchError: {said.format(1)}"
        rank.all_reduce(shape=(8 - rank.rank,), group="dp", ranks=(0, 1), failed=error)
    job.train(4)
    for rank in (job[2], job[3]):
        error = f"CollectiveMismatchError: {said.format(3)}"
        rank.step().all_reduce(shape=(10 - rank.rank,), group="dp", ranks=(2, 3), failed=error)
        rank.raised(MISMATCH_ERROR, f"{said.format(3)}. Called at /x.py:3", order=rank.rank)
    for rank in (job[0], job[1]):
        rank.step().all_reduce(shape=(64,), failed="PeerLostError: rank 3")
        rank.exited(-15, order=8, by_agent=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_among_ranks_that_continue_in_pairs() -> Job:
    job = world_breaks(Job(4).train(2))
    for _ in range(3):
        for rank in job.ranks:
            rank.step().all_reduce(group="pair", ranks=PAIRS[rank.rank])
    job[3].exited(7)
    job[2].step().all_reduce(group="pair", ranks=(2, 3), failed="PeerLostError: rank 3")
    return job


@story("network", [], confidence="possible")
def a_silent_network_after_a_caught_mismatch() -> Job:
    job = _survived()
    for rank in job.ranks:
        rank.step().all_reduce(shape=(64,), inside=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_in_a_loop_of_one_call_without_steps() -> Job:
    job = _rounds(mismatch_in_a_group_of_its_own(_rounds(Job(4), 5)), 50)
    job[3].exited(7)
    for rank in job.others(3):
        rank.all_reduce(shape=(64,), site=LOOP, failed="PeerLostError: rank 3")
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (3,)),))
def a_mismatch_at_the_start_after_which_little_was_called() -> Job:
    sites = ("train.py:1 f", "train.py:2 f", "train.py:3 f")
    job = _rounds(mismatch_in_a_group_of_its_own(Job(4)), 1, sites)
    job[3].exited(7)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_where_only_rank_0_marks_steps() -> Job:
    job = _rounds(Job(4), 2)
    mismatch_in_a_group_of_its_own(job)
    for _ in range(4):
        job[0].step()
        _rounds(job, 1)
    job[3].exited(7)
    for rank in job.others(3):
        rank.all_reduce(shape=(64,), site=LOOP, failed="PeerLostError: rank 3")
    return job


@story("dead_process", [1], "failure", confidence="certain")
def a_death_after_two_ranks_caught_their_mismatch() -> Job:
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.all_reduce(shape=(7 + rank.rank,), group="trial", failed=WRONG_SHAPE)
    return _dies(job.train(3), 1)


@story("host_hang", [3], "failure", confidence="certain")
def a_hang_that_timed_out_after_a_caught_mismatch() -> Job:
    job = _survived()
    job[3].stands()
    said = "all_reduce #18 in group 'world': missing: 3"
    for order, rank in enumerate(job.others(3)):
        rank.step().all_reduce(shape=(64,), failed=f"CollectiveTimeoutError: {said}")
        rank.raised("echelon.errors.CollectiveTimeoutError", said, order=order)
    return job


@story("host_hang", [1], confidence="certain")
def a_hang_in_a_second_group_of_the_same_name() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    for _ in range(3):
        for rank in job.ranks:
            rank.step().all_reduce(group="trial#2")
    job[1].stands()
    for rank in job.others(1):
        rank.step().all_reduce(group="trial#2", inside=True)
    return job


@story("host_hang", [1], confidence="certain")
def a_hang_in_a_group_that_was_used_again_after_the_mismatch() -> Job:
    """torch's groups can be used again after torch has compared the calls."""
    said = "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running"
    job = Job(4).train(2)
    for rank in job.ranks:
        rank.all_reduce(shape=(7 if rank.rank == 2 else 8,), failed=said)
    job.train(4)[1].stands()
    for rank in job.others(1):
        rank.step().all_reduce(shape=(64,), inside=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_after_a_caught_mismatch_of_messages() -> Job:
    said = "CollectiveMismatchError: send in group 'pair': the two ends differ"
    job = Job(4).train(2)
    job[0].send(1, group="pair", ranks=(0, 1), dtype="float32", failed=said)
    job[1].recv(0, group="pair", ranks=(0, 1), dtype="float64", failed=said)
    return _dies(job.train(4))


@story("exception", [1], "failure", confidence="certain")
def an_exception_of_a_program_that_trains_on_inside_its_handler() -> Job:
    job = _survived()
    job[1].raised("builtins.ValueError", "bad")
    assert job[1].words is not None
    job[1].words = replace(job[1].words, traceback=CONTEXT + job[1].words.traceback)
    for order, rank in enumerate(job.others(1), 1):
        rank.step().all_reduce(shape=(64,), failed="PeerLostError: rank 1")
        rank.exited(-15, order=order, by_agent=True)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_where_all_ranks_logged_the_caught_mismatch() -> Job:
    """No rank waits for rank 3, so that only its exit code tells that it died."""
    file = 'File "/home/user/job/train.py", line 30, in trial'
    logged = f"Traceback (most recent call last):\n  {file}\n{MISMATCH_ERROR}: x\n"
    job = _survived()
    job[3].exited(7, stderr_tail=logged)
    for order, rank in enumerate(job.others(3), 1):
        rank.exited(-15, order=order, by_agent=True, stderr_tail=logged)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def a_death_where_every_step_catches_a_mismatch() -> Job:
    """The newest of them is survived sooner: the program has caught it in every step."""
    job = _tries(Job(4).train(2), 12, but_last=False)
    job[3].exited(7)
    for rank in job.others(3):
        rank.step().all_reduce(shape=(64,), site=LOOP, failed="PeerLostError: rank 3")
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (0,)),))
def a_program_that_gives_up_after_many_caught_mismatches() -> Job:
    job = _tries(Job(4).train(2), 12, but_last=True)
    job[0].exited(3)
    for rank in job.others(0):
        rank.exited(-15, order=rank.rank, by_agent=True)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain")
def the_last_of_many_mismatches_is_not_caught() -> Job:
    job = _tries(Job(4).train(2), 12, but_last=True)
    for rank in job.ranks:
        rank.raised(MISMATCH_ERROR, "all_reduce #0 in group 't11'", order=rank.rank)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (3,)),))
def a_kill_just_after_a_mismatch() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    job[3].exited(-9)
    for rank in job.others(3):
        rank.step().all_reduce(shape=(64,), failed="PeerLostError: rank 3")
        rank.exited(-15, order=rank.rank + 1, by_agent=True)
    return job


@story("shape_mismatch", [2], confidence="certain")
def a_member_that_hangs_where_it_caught_the_mismatch() -> Job:
    job = mismatch_in_a_group_of_its_own(Job(4).train(2))
    job[3].stands()
    for rank in job.others(3):
        for _ in range(5):
            rank.step().all_reduce(group="rest", ranks=(0, 1, 2))
        rank.step().all_reduce(inside=True)
    return job


@story("shape_mismatch", [2], "failure", confidence="certain", also=(("dead_process", (3,)),))
def a_mismatch_after_which_one_step_was_made() -> Job:
    job = _survived(steps=1)
    job[3].exited(7)
    return job


def _caught_timeout(*, rank_2_calls: bool) -> Job:
    """Rank 2 came too late to a group of its own, or never; all ranks continue without it."""
    said = "CollectiveTimeoutError: all_reduce #0 in group 'trial' (4 ranks): missing: 2"
    job = Job(4).train(2)
    for rank in job.ranks:
        if rank.rank != 2 or rank_2_calls:
            rank.all_reduce(group="trial", failed=said, site="train.py:30 trial")
    return job


def _hangs(job: Job) -> Job:
    job[1].stands()
    for rank in job.others(1):
        rank.step().all_reduce(shape=(64,), site=LOOP, inside=True)
    return job


@story("host_hang", [1], confidence="certain")
def a_hang_after_a_caught_timeout() -> Job:
    return _hangs(_caught_timeout(rank_2_calls=True).train(4))


@story("host_hang", [1], confidence="certain")
def a_hang_after_a_caught_timeout_for_a_rank_that_never_came() -> Job:
    return _hangs(_caught_timeout(rank_2_calls=False).train(4))


@story("host_hang", [2], confidence="certain")
def a_caught_timeout_for_a_rank_that_still_hangs() -> Job:
    job = _caught_timeout(rank_2_calls=False)
    job[2].stands()
    for rank in job.others(2):
        for _ in range(4):
            rank.step().all_reduce(group="rest", ranks=(0, 1, 3))
        rank.step().all_reduce(inside=True)
    return job


@story("host_hang", [2], "failure", confidence="certain")
def a_timeout_that_ends_the_job_after_a_caught_one() -> Job:
    said = "all_reduce #18 in group 'world' (4 ranks): missing: 2"
    job = _caught_timeout(rank_2_calls=True).train(4)
    job[2].stands()
    for order, rank in enumerate(job.others(2)):
        rank.step().all_reduce(shape=(64,), failed=f"CollectiveTimeoutError: {said}")
        rank.raised("echelon.errors.CollectiveTimeoutError", said, order=order)
    return job


@story("host_hang", [2], "failure", confidence="certain")
def a_timeout_of_a_work_that_is_waited_for_steps_later() -> Job:
    job = _caught_timeout(rank_2_calls=False).train(3)
    job[2].stands()
    said = "all_reduce #0 in group 'trial' (4 ranks): missing: 2"
    for order, rank in enumerate(job.others(2)):
        rank.raised("echelon.errors.CollectiveTimeoutError", said, order=order)
    return job
