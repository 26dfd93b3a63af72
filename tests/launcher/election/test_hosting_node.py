"""Three hosts: the hosting one is killed or cut off, and the others continue.

Ranks write a history, one line per moment with the world to which it belongs; the checker reads the
lines of all ranks.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time

import pytest

from tests.launcher.background import Node
from tests.launcher.election.failing_over import elastic
from tests.support.hosts import needs_hosts
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_hosts]


def _host_of(nodes: list[Node]) -> Node:
    (host,) = [node for node in nodes if node.has("hosting the job with")]
    return host


def test_the_hosting_nodes_death_costs_the_job_one_incident(begin):
    job = begin(3, *elastic("1:3", 10))
    job.kill(0)
    for node in job.nodes[1:]:
        node.wait_for("training 2")
    host = _host_of(job.nodes[1:])
    host.wait_for("VERDICT")
    codes = job.stop()
    assert codes == [-signal.SIGKILL, 143, 143], job.cluster.told()
    assert "Traceback" not in job.cluster.told()
    job.assert_one_world_at_a_time()
    assert [world[0].rpartition("-")[2] for world in job.worlds()] == ["0", "1"]
    report = read_json(host.run_dir / "report.json")
    (incident,) = report["incidents"]
    assert "rank 0 was lost with node" in incident["reason"], incident
    assert incident["verdict"]["culprit_ranks"] == [0], incident
    assert report["world_size"] == 2
    present = json.loads((host.run_dir / "dump/latest/incident.json").read_text())
    assert present["ranks_present"] == [1, 2], "both others sent what they had"
    assert job.cluster.left() == []


def test_a_hosting_node_that_is_cut_off_stops_before_the_others_continue(begin):
    job = begin(3, *elastic("1:3", 4))
    job.hosts[0].cut()
    assert job.nodes[0].end() == 1, job.cluster.told()
    assert job.nodes[0].has("no majority of the 3 electing nodes answers"), job.cluster.told()
    for node in job.nodes[1:]:
        node.wait_for("training 2")
    assert job.stop() == [1, 143, 143], job.cluster.told()
    assert "Traceback" not in job.cluster.told()
    job.assert_one_world_at_a_time()
    assert job.cluster.left() == []


def test_two_nodes_report_that_they_have_no_majority(begin):
    job = begin(2, *elastic("2", 10))
    assert job.nodes[0].has("a world of 2 nodes has no majority without its host"), (
        job.cluster.told()
    )
    job.kill(0)
    assert job.nodes[1].end() == 1
    assert job.nodes[1].has("lost the coordinator node"), job.cluster.told()
    assert job.nodes[1].has("VERDICT"), job.cluster.told()
    assert job.cluster.left() == []


@pytest.mark.slow
def test_100_random_moments(begin, tmp_path):
    """Kill the hosting node's processes or cut its link at any moment, a start or restart too."""
    first = int(os.environ.get("ECHELON_ELECTION_FIRST", "0"))  # a campaign may run in pieces
    num_runs = int(os.environ.get("ECHELON_ELECTION_RUNS", "100"))
    delays = []
    for run in range(first, first + num_runs):
        dice = random.Random(run)
        job = begin(3, *elastic("1:3", 3), folder=tmp_path / str(run))
        select.select([], [], [], dice.uniform(0, 2.0))
        began_s = time.monotonic()
        how = dice.choice(["kill", "cut"])
        if how == "kill":
            job.kill(0)
        else:
            job.hosts[0].cut()
        for node in job.nodes[1:]:
            node.wait_for("training 2")
        delays.append(time.monotonic() - began_s)
        job.assert_one_world_at_a_time()
        job.stop()
        print(run, how, f"{delays[-1]:.1f} s", flush=True)
        assert job.cluster.left() == []
        job.cluster.close()
    assert max(delays) < 10, sorted(delays)[-5:]
