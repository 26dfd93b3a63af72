"""The kernel calls in which another process's threads wait, and the descendants of a process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.host import process, threads
from echelon.recorder.format.schema import HostFacts, HostThread, Identity
from echelon.recorder.read import read_dump
from echelon.recorder.read.dump import empty_record, write_dump
from tests.recorder.conftest import wait_until

_PROGRAM = """
import threading, time
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, kwargs={"timeout": 900}, daemon=True).start()
threading.Thread(target=lock.acquire, daemon=True).start()
print("ready", flush=True)
time.sleep(900)
"""


@pytest.fixture
def start():
    made = []

    def run(*argv: str) -> int:
        made.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        made[-1].stdout.readline()
        return made[-1].pid

    yield run
    for one in made:
        for pid in threads.descendants(one.pid):
            os.kill(pid, 9)
        one.kill()
        one.wait()
        one.stdout.close()


def _until(look, fits):
    """Look until what is seen fits: a thread takes a moment from its last line to the kernel."""
    for _ in range(3000):
        seen = look()
        if fits(seen):
            return seen
        select.select([], [], [], 0.02)
    raise AssertionError(seen)


def test_a_sleep_a_wait_and_a_wait_with_a_timeout_are_told_apart(start):
    pid = start(sys.executable, "-c", _PROGRAM)
    denied: list[str] = []
    seen = _until(
        lambda: threads.threads(pid, denied),
        lambda seen: denied or (len(seen) == 3 and all(one.call for one in seen)),
    )
    if denied:
        pytest.skip(f"not permitted here: {denied}")
    assert seen[0].call == "clock_nanosleep"
    assert sorted((one.call, one.timed) for one in seen[1:]) == [("futex", False), ("futex", True)]


def test_a_shell_is_looked_through_and_children_are_found(start):
    pid = start("sh", "-c", "sh -c 'echo ready; sleep 900; true'; true")
    below = _until(lambda: threads.descendants(pid), lambda found: len(found) == 2)
    assert threads.program_of(pid) == below[-1]
    comm = Path(f"/proc/{below[-1]}/comm")  # says "sh" until the fork has become sleep
    _until(comm.read_text, lambda name: name == "sleep\n")
    assert threads.program_of(os.getpid()) == os.getpid()


def test_what_is_denied_is_named_and_nothing_is_guessed(monkeypatch):
    real = Path.open

    def denied(path, *rest, **more):
        if path.name == "syscall":
            raise PermissionError(1, "Operation not permitted")
        return real(path, *rest, **more)

    monkeypatch.setattr(Path, "open", denied)
    names: list[str] = []
    seen = threads.threads(os.getpid(), names)
    assert names == ["syscall"]
    assert {(one.call, one.timed) for one in seen} == {("", False)}


def test_a_process_that_is_gone_has_no_call():
    assert threads.threads(1 << 22, []) == (HostThread(),)
    assert threads.descendants(1 << 22) == []


def test_threads_come_back_from_a_dump(tmp_path):
    facts = HostFacts(threads=(HostThread(name="a", call="futex", timed=True), HostThread()))
    path = tmp_path / "rank_0"
    write_dump(empty_record(path, Identity(rank=0), facts), path)
    assert read_dump(path).host == facts


def test_the_processor_time_of_a_child_counts_as_its_parents(start) -> None:
    spin = "import sys; print('ready', flush=True)\nwhile True: pass"
    pid = start(
        sys.executable,
        "-c",
        f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {spin!r}])
""",
    )
    before = process.sample(pid)
    wait_until(lambda: process.sample(pid).cpu_ticks >= before.cpu_ticks + 3, "3 ticks")
    assert process.cpu_share(before, process.sample(pid), 1.0) > 0
