"""Connections on which nothing moves: which pairs of ranks, and whose end they share."""

import pytest

from echelon.recorder.format.schema import Socket
from tests.analysis.imagined_job import Job


def _connect(job, hosts, broken=(), deaf=()):
    """Give each rank a connection to every other; `broken` (sender, receiver) pairs lose data."""

    def address(me, other):
        return f"10.0.0.{hosts[me]}:{40000 + me * len(job) + other}"

    for me in range(len(job)):
        job[me].host["sockets"] = tuple(
            Socket(
                local=address(me, other),
                peer=address(other, me),
                state="ESTABLISHED",
                unsent_bytes=65536 if (me, other) in broken else 0,
                unread_bytes=8192 if (other, me) in deaf else 0,
                retransmits=5 if (me, other) in broken else 0,
                moved_bytes=0,
            )
            for other in range(len(job))
            if other != me
        )


def _all_inside(size):
    job = Job(size).train(3)
    for rank in job.ranks:
        rank.all_reduce(inside=True)
    return job


@pytest.mark.parametrize(
    ("hosts", "broken", "culprits"),
    [
        ((1, 2, 3), {(0, 1), (1, 2), (2, 1)}, (1,)),
        ((1, 1, 2, 2, 3, 3), {(1, 2), (3, 4), (2, 1)}, (2, 3)),  # a ring; host 2 is cut off
        ((1, 1, 2, 2), {(0, 2), (1, 2)}, (2,)),  # two hosts, and rank 2 alone in every pair
        ((1, 1, 2, 2), {(1, 2), (3, 0)}, ()),  # between two hosts either may be at fault
    ],
)
def test_the_end_that_most_broken_links_share_is_named(hosts, broken, culprits):
    job = _all_inside(len(hosts))
    _connect(job, hosts, broken=broken)
    verdict = job.report("stall").verdict
    assert (verdict.cause.value, verdict.confidence.value) == ("network", "likely")
    assert verdict.culprit_ranks == culprits
    assert "not acknowledged, retransmitted 5 times" in " ".join(verdict.evidence)
    assert not set(verdict.fallout_ranks) & set(culprits)


def test_bytes_that_came_and_are_not_read_are_shown():
    job = _all_inside(3)
    _connect(job, (1, 2, 3), deaf={(0, 2), (1, 2)})
    verdict = job.report("stall").verdict
    assert verdict.culprit_ranks == (2,)
    assert "8,192 bytes have arrived but were not read" in " ".join(verdict.evidence)


def test_connections_that_are_idle_accuse_nobody():
    job = _all_inside(3)
    _connect(job, (1, 2, 3))
    verdict = job.report("stall").verdict
    assert (verdict.culprit_ranks, verdict.confidence.value) == ((), "possible")
    assert verdict.would_settle


@pytest.mark.parametrize("behind", [(2, 3), (0, 1), (3,)])
def test_one_hosts_ranks_are_through_and_the_packets_of_the_others_vanished(behind):
    """Over a dead link one side may complete what the other never does: not a device."""
    job = Job(4).train(3)
    for rank in job.ranks:
        rank.all_reduce(inside=rank.rank in behind)
        if rank.rank not in behind:
            rank.all_reduce(inside=True)
    _connect(job, (1, 1, 2, 2), broken={(0, 2), (2, 0)})
    verdict = job.report("stall").verdict
    assert (verdict.cause.value, verdict.culprit_ranks) == ("network", ())
    assert verdict.confidence.value == "likely"
    assert "not acknowledged" in " ".join(verdict.evidence)


def test_unread_bytes_do_not_excuse_a_device():
    job = Job(3).train(3)
    job[2].all_reduce(inside=True)
    for rank in job.others(2):
        rank.all_reduce().all_reduce(inside=True)
    _connect(job, (1, 2, 3), deaf={(0, 2)})
    verdict = job.report("stall").verdict
    assert (verdict.cause.value, verdict.culprit_ranks) == ("device_stuck", (2,))
