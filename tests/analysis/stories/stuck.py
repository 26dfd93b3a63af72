"""The others wait for a rank that stands somewhere else: in its code, its data, its storage."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


def _waiting_for(rank: int, size: int = 4) -> Job:
    job = Job(size).train(3)
    for other in job.others(rank):
        other.step().all_reduce(shape=(64,), site="train.py:20 backward", inside=True)
    job[rank].step()
    return job


@story("host_hang", [2], confidence="certain")
def hangs_in_its_own_code() -> Job:
    job = _waiting_for(2)
    job[2].stands("tokenize.py", 88, "wait_for_tokenizer")
    return job


@story("host_hang", [1], confidence="certain")
def hangs_inside_a_compute_span() -> Job:
    job = _waiting_for(1)
    job[1].span("compute").stands()
    return job


@story("data_starvation", [3], confidence="certain")
def waits_for_data() -> Job:
    job = _waiting_for(3)
    job[3].span("data_wait").stands("data.py", 12, "read")
    return job


@story("data_starvation", [1, 3], confidence="certain")
def two_wait_for_data() -> Job:
    job = Job(4).train(3)
    for rank in (job[0], job[2]):
        rank.all_reduce(inside=True)
    job[1].span("data_wait")
    job[3].span("data_wait")
    return job


@story("storage_stall", [0], confidence="certain")
def the_innermost_span_decides() -> Job:
    job = _waiting_for(0)
    job[0].span("compute").span("checkpoint", depth=1)
    return job


@story("host_hang", [0], confidence="certain")
def a_span_of_another_thread_does_not_count() -> Job:
    job = _waiting_for(0)
    job[0].span("compute").span("data_wait", thread=5).stands()
    return job


@story("storage_stall", [1], confidence="certain")
def sleeps_uninterruptibly() -> Job:
    job = _waiting_for(1)
    job[1].host.update(process_state="D", wait_channel="nfs_wait")
    return job


@story("compile_stall", [2], confidence="certain")
def compiles() -> Job:
    job = _waiting_for(2)
    job[2].span("compile")
    job[2].heartbeat_age_s = 20.0  # compilers hold the lock for long
    return job


@story("store_wait", [1], confidence="certain")
def waits_for_a_key() -> Job:
    job = _waiting_for(1)
    job[1].span("store", detail="epoch/7")
    return job


@story("frozen_process", [3], confidence="certain")
def is_stopped() -> Job:
    job = _waiting_for(3)
    job[3].host["process_state"] = "T"
    job[3].heartbeat_age_s = 30.0
    return job


@story("gil_hang", [2], confidence="likely")
def holds_the_lock() -> Job:
    job = _waiting_for(2)
    job[2].host.update(process_state="R", cpu_share=1.0)
    job[2].heartbeat_age_s = 25.0
    return job


@story("gil_hang", [2], confidence="likely")
def holds_the_lock_before_its_last_operation_is_marked_as_completed() -> Job:
    """What marks an operation as completed needs the lock, so a pending one shows no device."""
    job = Job(4).train(3)
    job[2].all_reduce(inside=True)
    for rank in job.others(2):
        rank.all_reduce().all_reduce(inside=True)
    job[2].host.update(process_state="S", cpu_share=0.0)
    job[2].heartbeat_age_s, job[2].native_heartbeat_age_s = 8.0, 0.3
    return job


@story("host_hang", [3], confidence="certain")
def a_subgroup_stall_is_reported_once() -> Job:
    job = Job(4).train(2)
    for rank in (job[0], job[1]):
        rank.all_reduce(group="tp0", ranks=(0, 1)).all_reduce(inside=True)
    job[2].all_reduce(group="tp1", ranks=(2, 3), inside=True)
    job[3].stands()
    return job


@story("host_hang", [2], confidence="certain")
def a_pipeline_waits_for_a_hung_stage() -> Job:
    job = Job(4).train(1)
    job[0].send(1)
    job[1].recv(0).send(2, inside=True)
    job[3].recv(2, inside=True)
    job[2].stands()
    return job


@story("data_starvation", [0, 1, 2], confidence="possible")
def everybody_waits_for_data() -> Job:
    job = Job(3).train(2)
    for rank in job.ranks:
        rank.span("data_wait")
    return job


@story("host_hang", [1], confidence="certain")
def hangs_before_it_comes_to_the_meeting() -> Job:
    job = Job(3)
    for rank in job.others(1):
        rank.span("store", detail="gather ranks")
    job[1].stands("train.py", 12, "load_everything")
    return job


@story("dead_process", [2], "", confidence="possible")
def rings_whose_owner_has_gone_silent() -> Job:
    """Read without their host: nobody said that rank 2 died, but its heart stopped."""
    job = _waiting_for(2)
    for rank in job.ranks:
        rank.host = {"alive": None}
    job[2].heartbeat_age_s = 25.0
    return job


@story("host_hang", [2], "failure", confidence="certain")
def does_not_come_to_the_first_meeting_and_the_others_give_up() -> Job:
    job = Job(3)
    for order, rank in enumerate(job.others(2)):
        rank.raised(
            "echelon.errors.CollectiveTimeoutError", "init after 30.0 s: missing: 2", order=order,
            bases=("echelon.errors.EchelonError",),
        )  # fmt: skip
    job[2].stands("train.py", 12, "load_everything")
    return job


def _ended_programs(size: int = 4) -> Job:
    job = Job(size).train(3)
    for rank in job.ranks:
        rank.closed = True
        rank.heartbeat_age_s = 30.0
        rank.host["exit_code"] = 0
    return job


@story("host_hang", [2], confidence="likely")
def ends_its_program_and_does_not_exit() -> Job:
    """Its heartbeat stopped because it closed its recorder, not because C code holds the lock."""
    job = _ended_programs()
    for rank in job.others(2):
        rank.host["alive"] = False
    job[2].host.pop("exit_code")
    return job


@story("skipped_collective", [1], confidence="likely")
def has_ended_its_program_while_the_others_go_on() -> Job:
    job = _waiting_for(1)
    job[1].closed = True
    job[1].heartbeat_age_s = 30.0
    return job
