"""The descendants of a process, examined from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from echelon.host.children import look_at, look_at_children
from echelon.host.stacks import can_spy
from tests.recorder.conftest import wait_until

_PARENT = """
import multiprocessing, os, subprocess, sys, time
def stands_here():
    os.close(1)
    time.sleep(900)
one = multiprocessing.get_context("fork").Process(target=stands_here)
one.start()
two = subprocess.Popen(["sleep", "900"], stdout=subprocess.DEVNULL)
print(one.pid, two.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def family():
    """Start a process with a Python child that sleeps and one that is another program."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    yield parent.pid, *pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    parent.stdin.close()
    assert parent.wait(60) == 0
    parent.stdout.close()


def test_living_children_are_seen_with_call_command_and_stack(family):
    parent, python, sleeper = family
    wait_until(lambda: look_at(python).call == "clock_nanosleep", "the child sleeps")
    seen, number = look_at_children(parent)
    by_pid = {child.pid: child for child in seen}
    assert (set(by_pid), number) == ({python, sleeper}, 2)
    assert by_pid[sleeper].command == "sleep 900"
    assert by_pid[sleeper].stacks == ""
    assert by_pid[python].state == "S"
    if can_spy():
        assert "in stands_here" in by_pid[python].stacks
        assert by_pid[python].stacks.count("Thread 0x") == 1


def test_a_dead_child_is_seen_with_its_signal(family):
    parent, python, _ = family
    os.kill(python, signal.SIGKILL)
    wait_until(lambda: look_at(python).state == "Z", "the child is dead and was not reaped")
    assert look_at(python).exit_code == -signal.SIGKILL
    assert python in {child.pid for child in look_at_children(parent)[0]}


def test_a_process_that_is_gone_is_left_out():
    assert look_at(2**22 - 1).state == ""


def test_no_more_than_the_limit_are_looked_at(family):
    seen, number = look_at_children(family[0], limit=1)
    assert (len(seen), number) == (1, 2)
