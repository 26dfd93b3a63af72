"""Ranks call the same things in orders, or with partners, that do not fit."""

from __future__ import annotations

from tests.analysis.imagined_job import Job
from tests.analysis.stories.story import story


@story("order_desync", [0, 1, 2, 3], confidence="certain")
def two_groups_in_different_orders() -> Job:
    job = Job(4).train(1)
    for rank in job.ranks:
        group = "a" if rank.rank < 2 else "b"
        rank.all_reduce(group=group, ranks=(0, 1, 2, 3), inside=True)
    return job


@story("order_desync", [1, 2], confidence="certain")
def only_the_ranks_on_the_ring() -> Job:
    job = Job(4).train(1)
    for rank in (0, 3):
        job[rank].all_reduce(inside=True)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    return job


@story("p2p_unmatched", [1], confidence="certain")
def receives_from_the_wrong_peer() -> Job:
    job = Job(4).train(1)
    job[0].send(1, inside=True)
    job[1].recv(2, inside=True)
    job[2].all_reduce(inside=True)
    job[3].all_reduce(inside=True)
    return job


@story("p2p_unmatched", [1], confidence="certain")
def receives_from_the_wrong_peer_while_the_send_was_buffered() -> Job:
    """The right sender has gone on: only the pairs' past tells the two receivers apart."""
    job = Job(4).train(1)
    for _ in range(3):
        for rank in range(3):
            job[rank].send(rank + 1)
            job[rank + 1].recv(rank)
    job[0].send(1).all_reduce(inside=True)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    job[3].recv(2, inside=True)
    return job


@story("p2p_unmatched", [1], confidence="certain")
def receives_from_the_wrong_peer_the_first_time() -> Job:
    job = Job(4).train(1)
    job[0].send(1)
    job[1].recv(2, inside=True)
    job[2].recv(1, inside=True)
    job[3].recv(2, inside=True)
    return job


@story("p2p_unmatched", [2], confidence="likely")
def forgets_a_send_it_made_before() -> Job:
    job = Job(3)
    for _ in range(3):
        job[2].send(0)
        job[0].recv(2)
        for rank in job.ranks:
            rank.all_reduce()
    job[0].recv(2, inside=True)
    for rank in (job[1], job[2]):
        rank.all_reduce(inside=True)
    return job


@story("p2p_unmatched", [0], confidence="likely")
def receives_what_nobody_ever_sent() -> Job:
    job = Job(3).train(3)
    job[0].recv(2, inside=True)
    for rank in (job[1], job[2]):
        rank.all_reduce(inside=True)
    return job


@story("p2p_unmatched", [0, 1], confidence="likely")
def tags_that_differ() -> Job:
    job = Job(2).train(1)
    job[0].send(1, tag=7, inside=True)
    job[1].recv(0, tag=8, inside=True)
    return job
