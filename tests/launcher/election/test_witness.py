"""Two nodes and a witness on a third host: either may be lost, and there are never two worlds."""

from __future__ import annotations

import signal

import pytest

from tests.launcher.election.failing_over import FailingOver, elastic
from tests.support.hosts import needs_hosts

pytestmark = [pytest.mark.netns, needs_hosts]

_VOTES = "votes: another node may replace this one"


@pytest.fixture
def two(begin):
    def make(lost_after_s: float) -> FailingOver:
        job = begin(2, *elastic("1:2", lost_after_s), has_witness=True)
        job.nodes[0].wait_for(_VOTES)
        return job

    return make


def test_one_of_two_nodes_replaces_the_hosting_one_with_the_vote_of_a_witness(two):
    job = two(3)
    job.kill(0)
    job.nodes[1].wait_for("training 1")
    assert job.nodes[1].has("hosting the job with 1 of its 2 nodes"), job.cluster.told()
    assert job.stop() == [-signal.SIGKILL, 143], job.cluster.told()
    assert job.witness.end() == 0
    assert "Traceback" not in job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


@pytest.mark.slow
def test_a_hosting_node_that_is_cut_off_stops_before_the_other_one_continues(two):
    job = two(4)
    job.hosts[0].cut()
    assert job.nodes[0].end() == 1, job.cluster.told()
    assert job.nodes[0].has("no majority of the 3 electing nodes answers"), job.cluster.told()
    job.nodes[1].wait_for("training 1")
    assert job.stop() == [1, 143], job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


@pytest.mark.slow
def test_nodes_that_lose_each_other_and_not_the_witness_make_one_world(two):
    job = two(3)
    job.hosts[0].lose_way_to(job.hosts[1])
    job.nodes[0].wait_for("training 1")
    assert job.nodes[1].end() == 1, job.cluster.told()
    assert job.stop() == [143, 1], job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


@pytest.mark.slow
def test_the_witness_may_be_lost_and_return(two):
    job = two(3)
    job.witness.kill()
    job.nodes[0].wait_for("does not answer")
    job.witness.restart()
    job.nodes[0].wait_for(_VOTES, count=2)
    job.witness.kill()
    job.nodes[0].wait_for("does not answer", count=2)
    job.kill(1)
    job.nodes[0].wait_for("training 1")
    assert job.stop() == [143, -signal.SIGKILL], job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


@pytest.mark.slow
def test_a_witness_that_was_started_again_votes_once_the_host_has_registered_it(two):
    job = two(3)
    job.witness.restart()
    job.kill(1)
    job.nodes[0].wait_for("training 1")
    assert job.stop() == [143, -signal.SIGKILL], job.cluster.told()
    assert job.cluster.left() == []
