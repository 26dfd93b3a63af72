"""Several things at once: independent groups, several hosts, a consequence that looks surer."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


@story("dead_process", [5], "failure", "certain")
def a_step_counted_twice_does_not_outrank_a_kill() -> Job:
    """Rank 0 called step() for its evaluation; with one call a step no more can be said of it."""
    job = Job(6)
    for _ in range(20):
        for rank in job.ranks:
            rank.step().all_reduce()
    job[0].step()
    for _ in range(20):
        for rank in job.ranks:
            rank.step().all_reduce()
    job[5].exited(-9)
    for rank in job.others(5):
        rank.step().all_reduce(inside=True)
    return job


@story("host_hang", [1], confidence="certain")
def a_healthy_pipeline_beside_a_stalled_pair() -> Job:
    job = Job(4).train(2)
    job[0].all_reduce(group="tp0", ranks=(0, 1), inside=True)
    job[1].stands("loader.py", 7, "load")
    last = max(rank.now_ns for rank in job.ranks) + 30 * 10**9 - 5 * 10**7
    job[3].stands("stage.py", 3, "forward")
    job[2].now_ns = last
    job[2].recv(3, group="pp", ranks=(2, 3), inside=True)
    job[2].span("pipeline", detail="0F3 waits in RECV_F for 1F3 of rank 3", site="pipe.py:9 step")
    job.snapshot_s = 0.05
    return job


@story("host_hang", [1, 3], confidence="certain")
def two_replicas_hang_each_for_a_reason_of_its_own() -> Job:
    job = Job(4).train(2)
    job[0].all_reduce(group="tp0", ranks=(0, 1), inside=True)
    job[2].wait(1.0).all_reduce(group="tp1", ranks=(2, 3), inside=True)
    job[1].stands("loader.py", 7, "load")
    job[3].stands("model.py", 9, "forward")
    return job


@story("host_hang", [3], confidence="certain")
def senders_of_a_reduce_may_finish_before_all_have_come() -> Job:
    job = Job(4).train(2)
    job[0].call("reduce", root=0, inside=True)
    for rank in (job[1], job[2]):
        rank.call("reduce", root=0).all_reduce(inside=True)
    job[3].stands("loader.py", 7, "load")
    return job


@story("device_stuck", [1, 4], confidence="likely")
def two_devices_fail_in_one_operation() -> Job:
    job = Job(6).train(2)
    for rank in job.ranks:
        rank.all_reduce(inside=rank.rank in (1, 4))
    for rank in job.others(1, 4):
        rank.all_reduce(inside=True)
    return job


def _two_hosts(size: int) -> Job:
    job = Job(size).train(2)
    for rank in job.ranks[size // 2 :]:
        rank.on_host("b", ahead_s=-5000.0)
    return job


@story("exception", [1], "failure", "certain", (("dead_process", (3,)),))
def the_coordinators_order_names_the_first_of_two_hosts() -> Job:
    """Host b's clock is hours behind and rank 3 was the first to end there."""
    job = _two_hosts(4)
    job[1].raised("builtins.ValueError", "bad batch", order=1)
    job[3].exited(-11, order=0)
    job.ended = [1, 3]
    return job


@story("exception", [1], "failure", "possible", (("dead_process", (3,)),))
def without_the_coordinators_order_nobody_knows_the_first_of_two_hosts() -> Job:
    job = _two_hosts(4)
    job[1].raised("builtins.ValueError", "bad batch", order=0)
    job[3].exited(-11, order=0)
    return job


@story("straggler", [4, 5, 6, 7], "", "likely")
def the_ranks_of_one_host_take_turns_at_being_last() -> Job:
    job = Job(8)
    for rank in job.ranks:
        rank.identity.update(host="a" if rank.rank < 4 else "b")
    for turn in range(80):
        for rank in job.ranks:
            slow = rank.rank >= 4
            rank.wait((0.012 if slow else 0.002) + (0.0005 if rank.rank == 4 + turn % 4 else 0))
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job


@story("straggler", [1, 3], "", "likely")
def two_ranks_are_equally_late() -> Job:
    job = Job(6)
    for turn in range(80):
        for rank in job.ranks:
            rank.wait((0.012 if rank.rank in (1, 3) else 0.002) + (turn + rank.rank) % 4 * 1e-5)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job


@story("skipped_collective", [1], confidence="certain")
def a_kill_by_hand_of_a_victim_does_not_hide_the_rank_that_skipped() -> Job:
    """Rank 3 was killed ten minutes after all had begun to wait for rank 1, which is ahead."""
    job = Job(4)
    for step in range(6):
        for rank in job.ranks:
            rank.step(step)
            for bucket in range(3):
                if not (rank.rank == 1 and step == 4 and bucket == 1):
                    rank.all_reduce(shape=(64,), site="train.py:20 backward")
    for rank in job.others(1):
        rank.operations[-1].update(state=2, completed_mono_ns=0)
    job[1].stands("train.py", 40, "evaluate")
    job[3].wait(600).exited(-9)
    return job
