"""Ordinary days of a cluster on which something that looks surer stands beside the cause."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


@story("exception", [1], "failure", "certain", (("dead_process", (3,)),))
def a_victim_is_reaped_before_the_rank_that_raised() -> Job:
    """Rank 0 lost its peer and ended first on its host; rank 3 aborts later on another."""
    job = Job(4).train(2)
    for rank in job.ranks[2:]:
        rank.on_host("b", ahead_s=-5000.0)
    job[1].raised("builtins.ValueError", "bad batch", order=1)
    job[0].raised(
        "echelon.errors.PeerLostError", "rank 1 is gone", order=0,
        bases=("echelon.errors.CollectiveError", "echelon.errors.EchelonError"),
    )  # fmt: skip
    job[3].wait(0.3).exited(-6, order=0)
    job.ended = [0, 1, 3]
    return job


@story("host_hang", [5], confidence="certain")
def a_step_counted_twice_does_not_outrank_a_hang() -> Job:
    job = Job(6)
    for step in range(40):
        job[0].step() if step == 20 else None
        for rank in job.ranks:
            rank.step().all_reduce()
    for rank in job.others(5):
        rank.step().all_reduce(inside=True)
    job[5].step().stands("loader.py", 7, "load")
    return job


@story("dead_process", [0], "failure", "certain", (("out_of_memory", (1,)),))
def memory_that_ran_out_a_minute_later_explains_no_crash() -> Job:
    job = Job(2).train(1)
    job[0].exited(-11, order=0)
    job[1].wait(60.0).raised("builtins.MemoryError", "", bases=("builtins.Exception",), order=1)
    return job


@story("dead_process", [0], "failure", "certain", (("out_of_memory", (1,)),))
def memory_that_ran_out_explains_no_segmentation_fault() -> Job:
    job = Job(2).train(1)
    job[0].exited(-11, order=0)
    job[1].raised("builtins.MemoryError", "", bases=("builtins.Exception",), order=1)
    return job


@story("host_hang", [2], confidence="certain")
def memory_at_its_limit_is_shown_and_does_not_change_the_cause() -> Job:
    job = Job(3).train(2)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    job[2].stands("cache.py", 5, "fill")
    job[2].host.update(memory_bytes=1 << 30, memory_limit_bytes=1 << 30)
    return job


@story("host_hang", [2], confidence="likely")
def what_may_not_be_read_lowers_the_confidence() -> Job:
    job = Job(3).train(2)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    job[2].host.update(not_permitted=("stack", "wchan"))
    return job


@story("unknown", [], confidence="possible")
def all_ranks_compile_in_child_processes() -> Job:
    """Between two collectives, all at one line of a compiler, and none waits: no rank is odd."""
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.host.update(process_state="S", cpu_share=0.98)
        rank.stands("/usr/lib/python3.11/site-packages/torch/_inductor/codecache.py", 9, "wait")
    return job


@story("host_hang", [0, 1], confidence="possible")
def all_ranks_sleep_and_none_waits_for_another() -> Job:
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.stands("main.py", 9, "wait_for_start")
    return job


@story("frozen_process", [1], "failure", "certain")
def victims_of_a_stopped_rank_end_by_their_timeouts() -> Job:
    """The errors of the others come first in time, and are what it caused."""
    job = Job(3).train(3)
    job[1].host.update(process_state="T")
    for order, rank in enumerate(job.others(1)):
        rank.all_reduce(failed="CollectiveTimeoutError: all_reduce #9: missing: 1")
        rank.wait(30).raised(
            "echelon.errors.CollectiveTimeoutError", "all_reduce #9 after 30.0 s: missing: 1",
            order=order, bases=("echelon.errors.CollectiveError", "echelon.errors.EchelonError"),
        )  # fmt: skip
    return job


@story("dead_process", [2], "failure", "certain", (("exception", (0,)),))
def an_exception_in_the_clean_up_after_a_kill_is_not_the_root() -> Job:
    job = Job(3).train(2)
    job[2].exited(-9, order=0)
    job[1].all_reduce(inside=True)
    job[0].wait(2).raised("builtins.KeyError", "'handle'", site="cleanup.py:3 close", order=1)
    return job
