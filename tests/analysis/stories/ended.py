"""A rank is gone: by an exception, a signal, an exit, or for want of memory."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


@story("exception", [2], "failure", confidence="certain")
def raises() -> Job:
    job = Job(4).train(3)
    job[2].step().raised("builtins.ValueError", "bad batch")
    for rank in job.others(2):
        rank.step().all_reduce(inside=True)
    return job


@story("exception", [1], "failure", confidence="certain")
def raises_first_and_others_lose_their_peer() -> Job:
    job = Job(4).train(3)
    job[1].step().raised("builtins.KeyError", "'x'", bases=("builtins.LookupError",), order=0)
    for order, rank in enumerate(job.others(1), 1):
        rank.step().all_reduce(failed="PeerLostError: rank 1 is gone")
        rank.raised(
            "echelon.errors.PeerLostError", "rank 1 is gone", order=order,
            bases=("echelon.errors.CollectiveError", "echelon.errors.EchelonError"),
        )  # fmt: skip
    return job


@story("exception", [3], "failure", confidence="certain", also=(("exception", (0,)),))
def the_earliest_exception_is_the_root() -> Job:
    job = Job(4).train(1)
    job[0].raised("builtins.ValueError", "later", order=1)
    job[3].raised("builtins.ValueError", "first", order=0)
    return job


@story("exception", [0], "failure", confidence="certain")
def raises_without_a_recorder() -> Job:
    job = Job(2)
    job[0].has_ring = False
    tail = 'Traceback (most recent call last):\n  File "/u/t.py", line 9, in f\nValueError: no\n'
    job[0].exited(1, stderr_tail=tail)
    job[1].has_ring = False
    return job


@story("exception", [1], "failure", confidence="certain")
def raises_under_torch_and_aborts_at_the_end() -> Job:
    """torch marks the lines of its traceback with the rank, and its threads abort the process."""
    job = Job(2)
    lines = [
        "Traceback (most recent call last):",
        '  File "/u/t.py", line 5, in <module>',
        "ValueError: x",
    ]
    tail = (
        "".join(f"[rank1]: {line}\n" for line in lines) + "terminate called without an exception\n"
    )
    job[1].has_ring = job[0].has_ring = False
    job[1].exited(-6, stderr_tail=tail)
    return job


@story("dead_process", [3], "failure", confidence="certain")
def killed() -> Job:
    job = Job(4).train(3)
    job[3].exited(-9)
    for rank in job.others(3):
        rank.all_reduce(inside=True)
    return job


@story("dead_process", [1], "failure", confidence="certain")
def sys_exit_without_a_traceback() -> Job:
    job = Job(3).train(2)
    job[1].exited(5)
    job[1].closed = True
    for rank in job.others(1):
        rank.all_reduce(failed="PeerLostError: rank 1 has left")
    return job


@story("dead_process", [1], "failure", confidence="certain")
def what_the_agent_stopped_is_fallout() -> Job:
    job = Job(3).train(2)
    job[0].exited(-15, order=0, by_agent=True)
    job[1].exited(-11, order=1)
    job[2].exited(-15, order=2, by_agent=True)
    return job


@story("dead_process", [2], confidence="certain")
def os_exit_0_in_the_middle() -> Job:
    job = Job(3).train(2)
    job[2].exited(0)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    return job


@story("dead_process", [2], "failure", confidence="likely")
def no_record_at_all() -> Job:
    job = Job(4).train(3, but=(2,))
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    return job.lose(2)


@story("out_of_memory", [0], "failure", confidence="certain")
def killed_for_memory() -> Job:
    job = Job(4).train(3)
    job[0].exited(-9, oom_kill=True, rss_bytes=7 << 30)
    for rank in job.others(0):
        rank.all_reduce(inside=True)
    return job


@story("out_of_memory", [1], "failure", confidence="certain")
def device_memory_is_used_up() -> Job:
    job = Job(2).train(3)
    job[1].raised("torch.OutOfMemoryError", "CUDA out of memory.", bases=("builtins.RuntimeError",))
    job[0].all_reduce(inside=True)
    return job
