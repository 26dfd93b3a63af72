"""No rank's code shows it: the network, a device, slowness, and what stays unknown."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


@story("network", [], confidence="possible")
def everybody_is_inside() -> Job:
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.all_reduce(inside=True)
    return job


@story("device_stuck", [2], confidence="likely")
def pending_here_and_done_by_its_peers() -> Job:
    job = Job(4).train(3)
    job[2].all_reduce(inside=True)
    for rank in job.others(2):
        rank.all_reduce().all_reduce(inside=True)
    return job


@story("straggler", [1], "", confidence="certain")
def last_again_and_again() -> Job:
    job = Job(4)
    for _ in range(60):
        for rank in job.ranks:
            rank.wait(0.012 if rank.rank == 1 else 0.002)
        latest = max(rank.now_ns for rank in job.ranks)
        for rank in job.ranks:
            rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    return job


@story("straggler", [2], "", confidence="certain")
def slow_before_the_first_of_several_buckets() -> Job:
    job = Job(4)
    for _ in range(60):
        for rank in job.ranks:
            rank.wait(0.02 if rank.rank == 2 else 0.004)
        for bucket in range(4):
            latest = max(rank.now_ns for rank in job.ranks)
            for rank in job.ranks:
                rank.all_reduce(shape=(bucket + 1,), took_s=(latest - rank.now_ns) / 1e9 + 0.001)
                rank.wait(((rank.rank + bucket) % 4) * 1e-6)
    return job


@story("unknown", [1], confidence="possible")
def a_stall_that_was_over_before_the_snapshot() -> Job:
    job = Job(3).train(4)
    job[1].wait(4.0)
    latest = job[1].now_ns
    for rank in job.ranks:
        rank.all_reduce(took_s=(latest - rank.now_ns) / 1e9 + 0.001)
    job.train(2)
    job[0].call("barrier", shape=None, inside=True, group="alone", ranks=(0,))
    return job


@story("unknown", [], confidence="possible")
def nobody_ever_recorded() -> Job:
    job = Job(2)
    job[0].has_ring = job[1].has_ring = False
    return job


@story("unknown", [], "failure", confidence="possible")
def nothing_explains_the_failure() -> Job:
    return Job(2).train(2)
