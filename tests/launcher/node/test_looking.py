"""Observation changes nothing: a hang is the same one after an incident as before it.

There are ten ways to hang in a system call or a C library, with and without the interpreter's lock.
A signal handler would end most of these calls, and with them the hang that the incident is about.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from echelon.host.facts import OUTSIDE, SIGNAL
from echelon.host.stacks import can_spy, spy_stacks
from echelon.launcher.incident.harvest import harvest
from echelon.launcher.incident.worker import Occasion, Worker
from echelon.launcher.node.guard import Guard
from tests.launcher.background import Node
from tests.recorder.conftest import wait_until
from tests.support.ranks import read_json

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not can_spy(), reason="needs py-spy"),
]

HANGS = {
    "sleep": "time.sleep(900)",
    "sleep, lock held": "held.sleep(900)",
    "poll": "select.poll().poll()",
    "poll, lock held": "held.poll(None, 0, -1)",
    "epoll": "select.epoll().poll()",
    "futex": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "futex, lock held": "word = ctypes.c_int(0); held.syscall(202, ctypes.byref(word), 0, 0, None)",
    "read": "os.read(os.pipe()[0], 1)",
    "flock": "fcntl.flock(open(__file__), fcntl.LOCK_EX)",
    "regex, lock held": "re.match('(a+)+$', 'a' * 64 + 'b')",
}
HANG = """
import ctypes, fcntl, os, re, select, sys, threading, time
held = ctypes.PyDLL(None)  # calls through it keep the interpreter's lock

def hang(how):
    exec(compile(how, __file__, "exec"), globals())
"""
ALONE = (
    HANG
    + """
from echelon.recorder.current import current
from echelon.recorder import span
recorder = current()
recorder.begin(recorder.group("world", (0, 1)), "all_reduce", sequence=0)
print("ready", flush=True)
hang(sys.argv[1])
"""
)


def call_of(pid: int) -> str:
    """Return the system call that a process's main thread waits in, with its arguments."""
    return Path(f"/proc/{pid}/syscall").read_text().strip()


def settled_call(pid: int, how: str) -> str:
    """Wait until a process hangs; return its system call ("running" where it computes)."""
    if how.startswith("regex"):
        return "running"
    looks: list[str] = []

    def is_still() -> bool:
        looks.append(call_of(pid))
        time.sleep(0.05)  # two looks apart: it is the same call, not one after the other
        return looks[-1] == call_of(pid) != "running" and looks.count(looks[-1]) >= 5

    wait_until(is_still, f"{how} hangs", timeout_s=60)
    return looks[-1]


@pytest.fixture
def patient_spy(monkeypatch):
    """Let py-spy take as long as it needs: ten of them at once are slow on a busy machine."""
    monkeypatch.setattr(
        "echelon.launcher.incident.stacks.spy_stacks", partial(spy_stacks, timeout_s=60.0)
    )
    monkeypatch.setattr("echelon.launcher.incident.harvest._SPY_S", 90.0)


@pytest.mark.usefixtures("patient_spy")
def test_a_harvest_leaves_every_hang_as_it_was(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(ALONE)
    started: list[subprocess.Popen[str]] = []
    with script.open() as keeps_the_lock:
        fcntl.flock(keeps_the_lock, fcntl.LOCK_EX)
        try:
            for rank, code in enumerate(HANGS.values()):
                environ = {"ECHELON_RANK_DIR": str(tmp_path / str(rank)), "RANK": str(rank)}
                started.append(
                    subprocess.Popen(
                        [sys.executable, str(script), code],
                        env={**os.environ, **environ},
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            for one in started:
                assert one.stdout is not None
                assert one.stdout.readline() == "ready\n"
            before = [settled_call(one.pid, how) for one, how in zip(started, HANGS, strict=True)]
            workers = [
                Worker(rank=rank, local_rank=rank, folder=tmp_path / str(rank), pid=one.pid)
                for rank, one in enumerate(started)
            ]
            occasion = Occasion(
                kind="stall", attempt=0, world_size=10, job_id="", oom_kills_before=None
            )
            records = harvest(workers, occasion, time.sleep)
            for one, how, call, record in zip(started, HANGS, before, records, strict=True):
                assert one.poll() is None, how
                assert how.startswith("regex") or call_of(one.pid) == call, how
                assert record.host.stacks_from == OUTSIDE, how
                assert "in hang" in record.host.stacks, (how, record.host)
                assert "in hang" in record.host.later_stacks, how
                if platform.machine() == "x86_64" and not how.startswith("regex"):
                    assert "PyObject_Vectorcall" in record.host.native_stacks, record.host
        finally:
            for one in started:
                one.kill()
                one.communicate()


JOB = (
    HANG
    + """
import numpy as np
import echelon.dist as dist
from echelon import recorder

world = dist.init(timeout_s=600)
x = np.ones(4, np.float32)
for step in range(3):
    recorder.step()
    world.all_reduce(x)
if world.rank == 1:
    print(f"hangs {os.getpid()}", flush=True)
    hang(sys.argv[1])
world.all_reduce(x)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("how", HANGS)
def test_a_job_hangs_on_after_its_incident_and_the_verdict_is_right(tmp_path, how):

    script = tmp_path / "train.py"
    script.write_text(JOB)
    run_dir = tmp_path / "run"
    with script.open() as keeps_the_lock:
        fcntl.flock(keeps_the_lock, fcntl.LOCK_EX)
        options = ["--nproc-per-node", "2", "--stall-timeout", "6", "--on-stall", "report"]
        job = Node(run_dir, [*options, str(script), HANGS[how]])
        try:
            job.wait_for("hangs ")
            (line,) = [line for line in job.lines if "hangs " in line]
            pid = int(line.split()[-1])
            before = settled_call(pid, how)
            job.wait_for("incident_0")
            path = run_dir / "dump/incident_0/verdict.json"
            wait_until(path.exists, "the verdict")
            verdict = wait_until(lambda: read_json(path)["verdict"], "the verdict")
            assert how.startswith("regex") or call_of(pid) == before
            assert verdict["culprit_ranks"] == [1], verdict
            cause = "gil_hang" if "lock held" in how else "host_hang"
            assert verdict["cause"] == cause, verdict
        finally:
            job.close()


CLOSED = """
import os
from echelon.recorder.current import current
current()
if {closes}:
    os.closerange(3, 64)
    for i in range(40):
        open(os.environ["MINE"], "ab", buffering=0)
        os.dup(os.open(os.environ["MINE"], os.O_WRONLY))
print("ready", flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("closes", [False, True])
def test_a_signal_is_the_last_resort_and_never_writes_into_the_programs_files(
    tmp_path, monkeypatch, closes
):
    monkeypatch.setattr("echelon.launcher.incident.stacks.spy_stacks", lambda _: "")
    mine, script = tmp_path / "mine", tmp_path / "program.py"
    mine.touch()
    script.write_text(CLOSED.format(closes=closes))
    environ = {"ECHELON_RANK_DIR": str(tmp_path / "rank"), "MINE": str(mine)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        worker = Worker(rank=0, local_rank=0, folder=tmp_path / "rank", pid=one.pid)
        occasion = Occasion(
            kind="failure", attempt=0, world_size=1, job_id="", oom_kills_before=None
        )
        (record,) = harvest([worker], occasion, time.sleep)
        one.kill()
    assert record.host.stacks_from == ("" if closes else SIGNAL)
    assert ("program.py" in record.host.stacks) is not closes
    assert mine.read_bytes() == b""


@pytest.mark.parametrize(("scope", "allows"), [("0\n", False), ("1\n", True), ("2\n", False)])
def test_the_guard_lets_the_agent_read_stacks_where_yama_asks_for_it(
    tmp_path, monkeypatch, scope, allows
):
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr("echelon.launcher.node.guard._YAMA", str(tmp_path / "scope"))
    calls: list[tuple[int, ...]] = []
    one, other = socket.socketpair()
    with one, other:
        Guard(one, lambda *values: calls.append(values), frozenset())._allow_agent()
    assert calls == ([(0x59616D61, os.getppid(), 0, 0, 0)] if allows else [])
