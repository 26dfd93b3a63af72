"""Every way to stop a job at every moment of it: who is signaled, with what, and when.

Whatever the cell, every launcher ends with the signal's exit code, every rank that was told to stop
has saved, which takes 3 s, and nothing is left.
"""

from __future__ import annotations

import re
import signal

import pytest

from tests.launcher.background import Node

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_SCRIPT = """
import os, pathlib, signal, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def save(number, frame):
    print("got", restart, rank, flush=True)
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        signal.sigtimedwait([], 0.05)
    (pathlib.Path(__file__).parent / f"saved_{restart}_{rank}").touch()
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
print("ready", restart, flush=True)
if sys.argv[2:] == ["fail"] and rank == "0":
    sys.exit(7)
while True:
    signal.pause()
"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize("target", ["all", "host", "last"])
@pytest.mark.parametrize("number", _SIGNALS)
@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("moment", ["running", "incident", "restart"])
def test_a_stop_at_any_moment(cluster, moment, num_nodes, number, target):
    job = cluster(_SCRIPT, "0.1" if moment == "restart" else "3", *_fails(moment))
    options = ("--nnodes", str(num_nodes), "--rdzv-conf", "join_timeout=20")
    if moment == "restart":
        options = (*options, "--max-restarts", "100", "--restart-policy", "always")
    nodes = [job.start(*options, rank=rank, nproc=1) for rank in range(num_nodes)]
    _wait_for(moment, nodes)
    targets = {"all": nodes, "host": nodes[:1], "last": nodes[-1:]}[target]
    for node in targets:
        node.process.send_signal(number)
    codes = [node.end() for node in nodes]
    # A node that leaves between two worlds is replaced, if another one connects in time.
    may_wait = moment == "restart" and target == "last"
    assert codes == [128 + number] * num_nodes or (
        may_wait and codes == [1] * (num_nodes - 1) + [128 + number]
    ), job.told()
    told = set(re.findall(r"\| got (\d+ \d+)", job.told()))
    saved = {" ".join(path.name.split("_")[1:]) for path in job.folder.glob("saved_*")}
    assert saved == told, job.told()
    if moment == "running":
        assert len(saved) == num_nodes, job.told()
    if moment == "incident":
        assert len(saved) == num_nodes - 1, job.told()
    assert "Traceback" not in job.told(), job.told()


def _fails(moment: str) -> list[str]:
    return [] if moment == "running" else ["fail"]


def _wait_for(moment: str, nodes: list[Node]) -> None:
    for node in nodes:
        node.wait_for("ready 0")
    if moment == "incident":
        nodes[0].wait_for("collecting")
    if moment == "restart":
        nodes[0].wait_for("restart 2 of 100")


@pytest.mark.parametrize("number", _SIGNALS)
def test_launchers_that_dial_end_at_once(cluster, number):
    job = cluster(_SCRIPT, "3")
    nodes: list[Node] = [job.start("--nnodes", "3", rank=rank, nproc=1) for rank in (1, 2)]
    for node in nodes:
        node.wait_for("joining")
        node.process.send_signal(number)
    assert [node.end() for node in nodes] == [128 + number] * 2, job.told()


def test_one_person_who_asks_twice_on_the_only_node_does_not_wait(cluster):
    job = cluster(_SCRIPT, "600")
    node = job.start("--nnodes", "1", "--shutdown-timeout", "300", rank=0, nproc=2)
    node.wait_for("ready 0", 2)
    node.process.send_signal(signal.SIGINT)
    node.wait_for("got", 2)
    for _ in range(600):  # counts from one second after the first on
        if node.process.poll() is not None:
            break
        node.process.send_signal(signal.SIGINT)
        signal.sigtimedwait([], 0.1)
    assert node.end() == 130, job.told()
    assert node.has("killing this node's workers now"), job.told()
    assert not list(job.folder.glob("saved_*"))


@pytest.mark.parametrize(("grace", "is_saved"), [("1", False), ("30", True)])
@pytest.mark.parametrize("target", ["all", "host", "last"])
def test_the_shutdown_timeout_is_honored_on_every_node(cluster, target, grace, is_saved):
    job = cluster(_SCRIPT, "4")
    options = ("--nnodes", "3", "--shutdown-timeout", grace)
    nodes = [job.start(*options, rank=rank, nproc=1) for rank in range(3)]
    _wait_for("running", nodes)
    for node in {"all": nodes, "host": nodes[:1], "last": nodes[-1:]}[target]:
        node.process.send_signal(signal.SIGTERM)
    assert [node.end() for node in nodes] == [143] * 3, job.told()
    assert len(list(job.folder.glob("saved_*"))) == (3 if is_saved else 0), job.told()
