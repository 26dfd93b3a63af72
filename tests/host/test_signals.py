"""What is visible of a process from outside, and a signal that reaches no other process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from echelon.host import process
from tests.recorder.conftest import wait_until

NUMBER = signal.SIGRTMIN + 6
CATCHES = """
import faulthandler, signal
faulthandler.register(signal.SIGRTMIN + 6, file=open("{path}", "wb"), all_threads=True)
print("ready", flush=True)
input()
"""


def test_a_process_that_catches_the_signal_gets_it(program, tmp_path):
    one = program(CATCHES.format(path=tmp_path / "stacks"))
    one.wait_for("ready")
    seen = process.sample(one.process.pid)
    assert process.send(one.process.pid, seen.start_ticks, NUMBER)
    wait_until(lambda: b"program.py" in (tmp_path / "stacks").read_bytes(), "its stacks")
    assert one.process.poll() is None


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_process_that_does_not_catch_it_never_gets_it(program, pidfd, monkeypatch):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    one = program("print('ready', flush=True); input(); print('lived')")
    one.wait_for("ready")
    seen = process.sample(one.process.pid)
    assert not process.send(one.process.pid, seen.start_ticks, NUMBER)
    out, _ = one.process.communicate("\n", timeout=60)
    assert (one.process.returncode, out) == (0, "lived\n")


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_reused_pid_is_never_hit(program, tmp_path, pidfd, monkeypatch):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    one = program(CATCHES.format(path=tmp_path / "stacks"))
    one.wait_for("ready")
    another = process.sample(one.process.pid).start_ticks - 1
    assert not process.send(one.process.pid, another, NUMBER)


def test_without_pidfd_the_signal_still_comes(program, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    one = program(CATCHES.format(path=tmp_path / "stacks"))
    one.wait_for("ready")
    seen = process.sample(one.process.pid)
    assert process.send(one.process.pid, seen.start_ticks, NUMBER)
    wait_until(lambda: (tmp_path / "stacks").read_bytes(), "its stacks")


def test_an_ended_process_is_neither_sampled_nor_hit(program):
    one = program("")
    start_ticks = process.sample(one.process.pid).start_ticks
    one.end()
    assert process.sample(one.process.pid).state == ""
    assert not process.send(one.process.pid, start_ticks, NUMBER)


def test_a_stopped_process_shows_its_state(program):
    one = program("print('ready', flush=True); input()")
    one.wait_for("ready")
    one.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.sample(one.process.pid).state == "T", "state T")


def test_a_share_of_a_core_tells_busy_from_idle(program):
    busy = program("print('ready', flush=True)\nwhile True: pass")
    idle = program("print('ready', flush=True); input()")
    busy.wait_for("ready")
    idle.wait_for("ready")
    pids = (busy.process.pid, idle.process.pid)
    before = [process.sample(pid) for pid in pids]
    started_s = time.monotonic()
    wait_until(lambda: process.sample(pids[0]).cpu_ticks >= before[0].cpu_ticks + 10, "10 ticks")
    elapsed_s = time.monotonic() - started_s
    shares = [
        process.cpu_share(b, process.sample(p), elapsed_s)
        for b, p in zip(before, pids, strict=True)
    ]
    assert shares[0] > 0
    assert shares[1] < shares[0]
    gone = process.Sample()
    assert process.cpu_share(before[0], gone, 1.0) is None
    assert process.cpu_share(before[0], before[0], 0.0) is None


def test_a_sample_is_of_the_process_asked_for():
    mine = process.sample(os.getpid())
    assert mine.state == "R"
    assert mine.rss_bytes > 1 << 20
    assert mine.not_permitted == ()


def test_the_tail_of_a_file_begins_at_a_line(tmp_path):
    path = tmp_path / "log"
    assert process.tail(path, 100) == ""
    path.write_bytes(b"first\nsecond\nthird\n")
    assert process.tail(path, 100) == "first\nsecond\nthird\n"
    assert process.tail(path, 10) == "third\n"
    path.write_bytes(b"\xff\xfe no text\n")
    assert "no text" in process.tail(path, 100)
