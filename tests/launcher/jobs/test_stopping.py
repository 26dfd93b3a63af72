"""Jobs that are stopped, as a whole or one node of them: workers always get to save."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.launcher.cluster import Cluster
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

# Every rank saves when it is told to stop, for as long as its first argument says; with "gate",
# rank 1 has saved as soon as the test says so.
_SCRIPT = """
import os, pathlib, signal, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def save(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    end = time.monotonic() + float(sys.argv[1])
    folder = pathlib.Path(__file__).parent
    is_gated = sys.argv[2:] == ["gate"] and rank == "1"
    while time.monotonic() < end and not (is_gated and (folder / "gate").exists()):
        signal.sigtimedwait([], 0.05)
    (folder / f"saved_{restart}_{rank}").touch()
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
print("ready", restart, "of", os.environ["WORLD_SIZE"], flush=True)
if sys.argv[2:] == ["fail"] and rank == "0":
    sys.exit(7)
if sys.argv[2:] == ["once"] and restart == "1":
    sys.exit(0)
while True:
    signal.pause()
"""


def _started(job: Cluster, num_nodes: int, *options: str, nproc: int = 1) -> list[Node]:
    nodes = [
        job.start(*(options or ("--nnodes", str(num_nodes))), rank=rank, nproc=nproc)
        for rank in range(num_nodes)
    ]
    for node in nodes:
        node.wait_for("ready 0", nproc)
    return nodes


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved_*"))


@pytest.mark.parametrize(
    ("num_nodes", "number"),
    [
        (2, signal.SIGTERM),
        pytest.param(3, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(3, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(3, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_all_launchers_are_signaled_at_once_and_every_rank_saves(
    cluster, tmp_path, num_nodes, number
):
    job = cluster(_SCRIPT, "0.4")
    nodes = _started(job, num_nodes)
    for node in nodes:
        node.process.send_signal(number)
    assert [node.end() for node in nodes] == [128 + number] * num_nodes, job.told()
    assert _saved(tmp_path) == [f"saved_0_{rank}" for rank in range(num_nodes)], job.told()
    report = read_json(nodes[0].run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"]) == ("signal", 128 + number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("target", ["all", "host", "other"])
def test_ranks_that_save_for_three_seconds_have_saved(cluster, tmp_path, number, target):
    job = cluster(_SCRIPT, "3")
    nodes = _started(job, 2, nproc=2)
    targets = {"all": nodes, "host": nodes[:1], "other": nodes[1:]}[target]
    for node in targets:
        node.process.send_signal(number)
    for node in targets:  # the same again, from a scheduler that repeats itself
        node.process.send_signal(number)
    assert [node.end() for node in nodes] == [128 + number] * 2, job.told()
    assert _saved(tmp_path) == [f"saved_0_{rank}" for rank in range(4)], job.told()


@pytest.mark.slow
def test_the_shutdown_timeout_ends_the_patience(cluster, tmp_path):
    job = cluster(_SCRIPT, "60")
    nodes = _started(job, 2, "--nnodes", "2", "--shutdown-timeout", "0.5")
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [143, 143], job.told()
    assert _saved(tmp_path) == []


def test_ctrl_c_twice_is_one_persons_impatience_on_one_node(cluster, tmp_path):
    job = cluster(_SCRIPT, "600", "gate")
    first, second = _started(job, 2, "--nnodes", "2", "--shutdown-timeout", "300")
    first.process.send_signal(signal.SIGINT)
    first.wait_for("got SIGINT")
    second.wait_for("got SIGINT")
    deadline = time.monotonic() + 60
    while first.process.poll() is None and time.monotonic() < deadline:
        first.process.send_signal(signal.SIGINT)  # counts from one second after the first on
        if first.has("killing this node's workers now"):
            break
        time.sleep(0.2)
    (tmp_path / "gate").touch()
    assert [first.end(), second.end()] == [130, 130], job.told()
    assert _saved(tmp_path) == ["saved_0_1"], job.told()


def test_one_node_of_an_elastic_job_leaves_with_time_to_save_and_the_rest_goes_on(
    cluster, tmp_path
):
    job = cluster(_SCRIPT, "0.4", "once")
    options = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60")
    first, second = _started(job, 2, *options)
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 143, job.told()
    assert first.end() == 0, job.told()
    assert _saved(tmp_path) == ["saved_0_0", "saved_0_1"], job.told()
    assert first.has("is leaving the job"), job.told()
    assert first.has("ready 1 of 1"), job.told()
    report = read_json(first.run_dir / "report.json")
    assert (report["ended_by"], report["exit_code"], report["attempts"]) == ("worker", 0, 2)
    assert report["incidents"] == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_launcher_that_still_dials_ends_at_once(cluster, number):
    job = cluster(_SCRIPT, "0")
    node = job.start("--nnodes", "2", rank=1)
    node.wait_for("joining")
    node.process.send_signal(number)
    assert node.end() == 128 + number, job.told()


@pytest.mark.slow
def test_a_node_that_waits_for_others_leaves_and_the_host_goes_on_waiting(cluster):
    job = cluster(_SCRIPT, "0")
    host = job.start("--nnodes", "3", rank=0)
    other = job.start("--nnodes", "3", rank=1)
    host.wait_for("connected")
    other.process.send_signal(signal.SIGTERM)
    assert other.end() == 143, job.told()
    assert host.process.poll() is None, job.told()
    host.process.send_signal(signal.SIGTERM)
    assert host.end() == 143, job.told()
    assert read_json(host.run_dir / "report.json")["ended_by"] == "signal"


def test_a_stop_during_an_incident_does_not_wait_for_it(cluster, tmp_path):
    job = cluster(_SCRIPT, "0.3", "fail")
    nodes = _started(job, 2)
    nodes[0].wait_for("collecting")
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [143, 143], job.told()
    assert _saved(tmp_path) == ["saved_0_1"], job.told()


@pytest.mark.slow
def test_a_stop_during_a_restart_ends_the_job(cluster, tmp_path):
    job = cluster(_SCRIPT, "0.2", "fail")
    nodes = _started(job, 2, "--nnodes", "2", "--max-restarts", "100", "--restart-policy=always")
    nodes[0].wait_for("restart 2 of 100")
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [143, 143], job.told()
