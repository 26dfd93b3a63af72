"""The hosting node is lost at a bad moment: while the job is busy, or together with more."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest

from tests.launcher.background import WAIT_S
from tests.launcher.election.failing_over import elastic
from tests.support.hosts import needs_hosts

pytestmark = [pytest.mark.netns, needs_hosts, pytest.mark.slow]


@pytest.mark.parametrize("moment", ["collecting diagnostics", "restart 1 of 3"])
@pytest.mark.parametrize("how", ["kill", "cut"])
def test_during_an_incident_or_a_restart(begin, moment, how):
    job = begin(3, *elastic("1:3", 3), "--max-restarts", "3")
    job.fail(1)
    job.nodes[0].wait_for(moment)
    if how == "kill":
        job.kill(0)
    else:
        job.hosts[0].cut()
    for node in job.nodes[1:]:
        node.wait_for("training 2")
    assert job.nodes[0].end() == (-signal.SIGKILL if how == "kill" else 1), job.cluster.told()
    assert job.stop()[1:] == [143, 143], job.cluster.told()
    assert "Traceback" not in job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


def test_a_hosting_launcher_that_was_stopped_finds_its_job_elsewhere(begin):
    """Its guard ends its ranks in time, for the others cannot know whether they run."""
    job = begin(3, *elastic("1:3", 3))
    launcher = min(job.cluster.marked(0))
    os.kill(launcher, signal.SIGSTOP)
    try:
        for node in job.nodes[1:]:
            node.wait_for("training 2")
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert job.nodes[0].end() == 1, job.cluster.told()
    assert job.nodes[0].has("this node stops"), job.cluster.told()
    assert job.stop() == [1, 143, 143], job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


def test_two_of_five_nodes_are_lost_at_once(begin):
    job = begin(5, *elastic("1:5", 3))
    job.kill(0)
    job.kill(1)
    for node in job.nodes[2:]:
        node.wait_for("training 3")
    assert job.stop() == [-signal.SIGKILL] * 2 + [143] * 3, job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


def test_the_elected_node_dies_as_well(begin):
    job = begin(5, *elastic("1:5", 3))
    job.kill(0)
    elected = None
    deadline_s = time.monotonic() + WAIT_S
    while elected is None:
        assert time.monotonic() < deadline_s, job.cluster.told()
        select.select([], [], [], 0.02)
        told = (i for i, node in enumerate(job.nodes) if node.has("elected to host the job"))
        elected = next(told, None)
    job.kill(elected)
    rest = [node for index, node in enumerate(job.nodes) if index not in (0, elected)]
    for node in rest:
        node.wait_for("training 3")
    assert sorted(job.stop()) == [-signal.SIGKILL] * 2 + [143] * 3, job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_cut_in_one_direction(begin, deaf):
    """The host and one node lose each other, and a third one hears both: the host keeps its job."""
    job = begin(3, *elastic("1:3", 3))
    job.hosts[1 - deaf].lose_way_to(job.hosts[deaf])
    for index in (0, 2):
        job.nodes[index].wait_for("training 2")
    assert job.nodes[1].end() == 1, job.cluster.told()
    assert job.stop() == [143, 1, 143], job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


def test_the_host_is_lost_while_another_node_leaves(begin):
    """Both are gone at once, and two of three are no minority: the third one stops, in words."""
    job = begin(3, *elastic("1:3", 3))
    job.nodes[2].process.send_signal(signal.SIGTERM)
    job.nodes[0].wait_for("is leaving the job")
    job.kill(0)
    assert job.nodes[2].end() in (1, 143), job.cluster.told()
    codes = job.stop()
    assert codes[1] in (1, 143), job.cluster.told()
    job.assert_one_world_at_a_time()
    assert "Traceback" not in job.cluster.told()
    assert job.cluster.left() == []
