"""What the machine shows of a rank: its cgroup, its kernel's wait channels, its second look."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


def _waiting_for(rank: int, size: int = 4) -> Job:
    job = Job(size).train(3)
    for other in job.others(rank):
        other.step().all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    job[rank].step()
    return job


@story("frozen_process", [2], confidence="certain")
def its_cgroup_is_frozen() -> Job:
    job = _waiting_for(2)
    job[2].host.update(frozen=True, process_state="S")
    job[2].heartbeat_age_s = 30.0
    return job


@story("straggler", [1], confidence="likely")
def its_cgroup_is_throttled_to_next_to_nothing() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="R", cpu_share=0.03, throttled_share=0.95)
    job[1].heartbeat_age_s = 8.0
    return job


@story("straggler", [1], confidence="likely")
def is_runnable_and_gets_no_processor() -> Job:
    """Neither heartbeat runs: it holds no lock, it waits for a core."""
    job = _waiting_for(1)
    job[1].host.update(process_state="R", cpu_share=0.02)
    job[1].heartbeat_age_s, job[1].native_heartbeat_age_s = 12.0, 11.0
    return job


@story("straggler", [1], confidence="likely")
def gets_no_processor_while_its_cgroup_is_under_pressure() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="S", cpu_share=0.3, pressure={"cpu": 0.95})
    job[1].heartbeat_age_s = job[1].native_heartbeat_age_s = 8.0
    return job


@story("straggler", [1], confidence="possible")
def both_heartbeats_are_old_and_nothing_says_why() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="S")
    job[1].heartbeat_age_s = job[1].native_heartbeat_age_s = 8.0
    return job


@story("gil_hang", [2], confidence="likely")
def holds_the_lock_while_its_native_heartbeat_goes_on() -> Job:
    job = _waiting_for(2)
    job[2].host.update(process_state="R", cpu_share=0.02, pressure={"cpu": 0.95})
    job[2].heartbeat_age_s, job[2].native_heartbeat_age_s = 12.0, 0.4
    return job


@story("frozen_process", [2], confidence="certain")
def a_stopped_process_is_not_one_without_a_processor() -> Job:
    job = _waiting_for(2)
    job[2].host.update(process_state="T", cpu_share=0.0)
    job[2].heartbeat_age_s = job[2].native_heartbeat_age_s = 30.0
    return job


@story("device_stuck", [3], confidence="likely")
def sleeps_uninterruptibly_in_a_driver() -> Job:
    job = _waiting_for(3)
    job[3].host.update(process_state="D", wait_channel="nvidia_ioctl")
    return job


@story("storage_stall", [1], confidence="certain")
def sleeps_uninterruptibly_in_a_file_system() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="D", wait_channel="nfs_wait_bit_killable")
    return job


@story("storage_stall", [1], confidence="likely")
def sleeps_uninterruptibly_while_the_disks_are_under_pressure() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="D", wait_channel="", pressure={"io": 0.9})
    return job


@story("storage_stall", [1], confidence="certain")
def pickles_inside_its_checkpoint_span() -> Job:
    """A stale heartbeat does not say more than the span that is open."""
    job = _waiting_for(1)
    job[1].span("checkpoint", site="save.py:3 save")
    job[1].heartbeat_age_s = 20.0
    return job


@story("straggler", [1], confidence="likely")
def moves_on_between_two_looks() -> Job:
    """Slow, not stuck: it recorded 400 events in two seconds and stands at another line."""
    job = _waiting_for(1)
    for rank in job.ranks:
        rank.looked_at_again()
    job[1].stands("filter.py", 10, "f").looked_at_again(recorded=400, at=("filter.py", 12, "g"))
    return job


@story("storage_stall", [0, 1, 2], confidence="possible")
def all_ranks_save_for_longer_than_the_limit() -> Job:
    job = Job(3).train(2)
    for rank in job.ranks:
        rank.span("checkpoint", site="save.py:3 save")
    return job


@story("unknown", [], confidence="possible")
def all_ranks_compute() -> Job:
    """Nobody waits, and all are busy: a long compilation or evaluation, as far as can be seen."""
    job = Job(2).train(2)
    for rank in job.ranks:
        rank.stands("train.py", 19, "train")
        rank.host.update(process_state="R", cpu_share=0.99)
    return job


@story("device_stuck", [2], confidence="likely")
def one_kernel_never_started_among_those_that_spin() -> Job:
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.all_reduce(inside=True, created=rank.rank == 2)
    return job
