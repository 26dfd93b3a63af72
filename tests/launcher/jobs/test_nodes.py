"""Several nodes, each a separate `echelon run`, that meet on loopback."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

_WAIT_FOR_ALL = ("--rdzv-conf", "last_call_timeout=60")  # however slow the machine is now

# Every rank tells its place, and the ranks of a restarted job end at once.
_SCRIPT = """
import os, signal, sys
world = int(os.environ["WORLD_SIZE"])
print("place", os.environ["GROUP_RANK"], os.environ["RANK"], os.environ["LOCAL_RANK"], world,
      os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if sys.argv[1] == "end" or os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[2]:
    sys.exit(0)
if sys.argv[1] == "fail" and os.environ["RANK"] == str(world - 1):
    sys.exit(42)
signal.pause()
"""


def test_ranks_follow_the_nodes_and_all_end_well(cluster):
    job = cluster(_SCRIPT, "end", "-")
    first = job.start("--nnodes", "2", rank=0)
    second = job.start("--nnodes", "2", rank=1)
    assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    assert sorted(line for line in first.lines if "place" in line) == [
        "0:0| place 0 0 0 4 0", "0:1| place 0 1 1 4 0",
    ]  # fmt: skip
    assert sorted(line for line in second.lines if "place" in line) == [
        "1:2| place 1 2 0 4 0", "1:3| place 1 3 1 4 0",
    ]  # fmt: skip
    report = read_json(first.run_dir / "report.json")
    assert (report["world_size"], report["exit_code"]) == (4, 0)
    assert len(report["ranks"]) == 4


def test_a_failure_anywhere_is_explained_everywhere(cluster):
    job = cluster(_SCRIPT, "fail", "-")
    first = job.start("--nnodes", "2", rank=0)
    second = job.start("--nnodes", "2", rank=1)
    assert (first.end(), second.end()) == (42, 42), (first.lines, second.lines)
    for node in (first, second):
        assert any("VERDICT" in line and "rank 3" in line for line in node.lines), node.lines
    incident = first.run_dir / "dump/latest"
    assert {path.name for path in incident.glob("rank_*")} == {f"rank_{r}" for r in range(4)}
    verdict = read_json(incident / "verdict.json")["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("dead_process", [3])


def test_a_node_that_is_killed_leaves_a_smaller_world(cluster):
    job = cluster(_SCRIPT, "wait", "1")
    first = job.start("--nnodes", "1:2", *_WAIT_FOR_ALL, rank=0)
    second = job.start("--nnodes", "1:2", rank=1)
    second.wait_for("place", 2)
    second.process.kill()
    assert first.end() == 0, first.lines
    assert sum("place 0 0 0 2 1" in line for line in first.lines) == 1, first.lines
    assert any("lost node" in line and "ranks 2-3" in line for line in first.lines), first.lines
    report = read_json(first.run_dir / "report.json")
    assert (report["attempts"], report["incidents"][0]["recovered"]) == (2, True)
    absent = read_json(first.run_dir / "dump/incident_0/incident.json")["ranks_absent"]
    assert set(absent) == {"2", "3"}


def test_a_node_that_falls_silent_is_lost_too(cluster):
    job = cluster(_SCRIPT, "wait", "1")
    first = job.start("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60,lost_after=4", rank=0)
    second = job.start("--nnodes", "1:2", rank=1)
    second.wait_for("place", 2)
    second.process.send_signal(signal.SIGSTOP)
    assert first.end() == 0, first.lines
    assert any("no heartbeat for" in line for line in first.lines), first.lines
    second.process.send_signal(signal.SIGCONT)
    assert second.end() == 1, second.lines
    assert any("lost the coordinator node" in line for line in second.lines), second.lines


def test_when_the_coordinator_is_lost_nodes_keep_their_story_and_end(cluster):
    job = cluster(_SCRIPT, "wait", "-")
    first = job.start("--nnodes", "2", rank=0)
    second = job.start("--nnodes", "2", rank=1)
    second.wait_for("place", 2)
    first.wait_for("place", 2)
    first.process.kill()
    assert second.end() == 1, second.lines
    assert any("lost the coordinator node" in line for line in second.lines), second.lines
    incident = second.run_dir / "dump/latest"
    assert {path.name for path in incident.glob("rank_*")} == {"rank_2", "rank_3"}


def test_a_spare_takes_the_place_of_a_lost_node(cluster):
    job = cluster(_SCRIPT, "wait", "1")
    options = ("--nnodes", "2", "--spares", "1", "--rdzv-conf")
    first = job.start(*options, "is_host=true")
    options = (*options, "is_host=false")
    second = job.start(*options)
    for node in (first, second):
        node.wait_for("place", 2)
    spare = job.start(*options)
    first.wait_for("it will join at the next restart")
    fourth = job.start(*options)
    assert fourth.end() == 1
    assert any("the job already has 2 nodes and 1 spare" in line for line in fourth.lines)
    assert not any("place" in line for line in spare.lines), "a spare waits"
    second.process.kill()
    assert (first.end(), spare.end()) == (0, 0), job.told()
    assert sum("place 0 0 0 4 1" in line for line in first.lines) == 1, first.lines
    assert sum("place 1" in line for line in spare.lines) == 2, spare.lines
    report = read_json(first.run_dir / "report.json")
    assert (report["attempts"], report["world_size"], report["exit_code"]) == (2, 4, 0)


def test_too_few_nodes_is_one_line_that_names_who_came(cluster):
    job = cluster(_SCRIPT, "end", "-")
    node = job.start("--nnodes", "2", "--rdzv-conf", "join_timeout=1", rank=0)
    assert node.end() == 1
    host = socket.gethostname()
    assert any(
        f"1 of 2 required nodes connected within 1 s ({host})" in line for line in node.lines
    )
    assert not any("Traceback" in line for line in node.lines)


def test_a_node_that_is_killed_before_it_has_workers_leaves_nothing_in_memory(cluster):
    job = cluster(_SCRIPT, "end", "-")
    node = job.start("--nnodes", "2", rank=0)
    node.wait_for("ranks on each of 2 nodes")
    node.process.kill()
    node.end()
    assert job.left() == []
    homes = list(Path("/dev/shm").glob(f"echelon-{os.getuid()}-*/home"))
    assert str(node.run_dir) not in [home.read_text() for home in homes]


def test_an_endpoint_that_is_taken_is_one_line(cluster):
    job = cluster(_SCRIPT, "end", "-")
    with socket.create_server(("127.0.0.1", int(job.endpoint.rpartition(":")[2]))):
        node = job.start("--nnodes", "2", rank=0)
        assert node.end() == 2
    (line,) = node.lines
    assert f"cannot listen on {job.endpoint}: Address already in use; is another job" in line


def test_nobody_to_join_is_one_line(cluster):
    job = cluster(_SCRIPT, "end", "-")
    node = job.start("--nnodes", "2", "--rdzv-conf", "join_timeout=1", rank=1)
    assert node.end() == 1
    assert any("could not reach the coordinator at" in line for line in node.lines), node.lines
    assert not any("Traceback" in line for line in node.lines)


def test_a_stranger_with_another_secret_is_kept_out(cluster):
    job = cluster(_SCRIPT, "end", "-")
    first = job.start("--nnodes", "2", rank=0)
    stranger = job.start("--nnodes", "2", rank=1, secret="a-guess-of-a-stranger")
    assert stranger.end() == 1
    assert any("the secret does not match" in line for line in stranger.lines), stranger.lines
    second = job.start("--nnodes", "2", rank=1)
    assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)


def test_a_node_that_comes_late_joins_at_the_next_start(cluster):
    job = cluster(_SCRIPT, "wait", "1")
    first = job.start("--nnodes", "1:2", "--max-restarts", "1", rank=0)
    first.wait_for("place 0 0 0 2 0")
    second = job.start("--nnodes", "1:2", rank=1)
    first.wait_for("it will join at the next restart")
    workers = [pid for pid in job.marked() if _parent_is_guard_of(pid, first)]
    os.kill(workers[0], signal.SIGKILL)
    assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    assert any("place 1 2 0 4 1" in line for line in second.lines), second.lines


def _parent_is_guard_of(pid: int, node: Node) -> bool:
    def parent(of: int) -> int:
        try:
            return int(Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    return parent(parent(pid)) == node.process.pid
