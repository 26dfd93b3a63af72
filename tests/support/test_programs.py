"""Test programs on hosts: every way to exit is reported, and no program outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.launcher.cluster import left
from tests.support.hosts import hosts, needs_hosts, run_text_on

pytestmark = [pytest.mark.netns, needs_hosts]

_ENDS = """
import atexit, os, signal, sys
rank = int(os.environ["RANK"])
atexit.register(lambda: print("left", flush=True))
with open("/proc/net/fib_trie") as file:
    addresses = file.read()
print(__name__, sys.argv, os.environ["LOCAL_RANK"], "10.77." in addresses, flush=True)
if rank == 1:
    raise KeyError("rank one")
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 3:
    sys.exit(42)
"""

_HANGS = """
import os, signal, subprocess
subprocess.Popen(["sleep", "1000"])
print("waits", flush=True)
signal.pause()
"""


def test_each_rank_ends_as_a_program_of_its_own_would():
    with hosts(2) as machines:
        ends = run_text_on(machines, _ENDS, "given")
    assert [end.returncode for end in ends] == [0, 1, -signal.SIGKILL, 42]
    assert [end.stdout.splitlines() for end in ends] == [
        [f"__main__ ['-c', 'given'] {rank % 2} True"] + ["left"] * (rank != 2) for rank in range(4)
    ]
    assert "KeyError: 'rank one'" in ends[1].stderr
    assert [ends[rank].stderr for rank in (0, 2, 3)] == ["", "", ""]


def test_one_that_runs_on_is_ended_with_what_it_started(monkeypatch):
    mark = f"ECHELON_TEST_MARK={os.getpid()}-programs"
    monkeypatch.setenv(*mark.split("="))
    with hosts(1) as machines, pytest.raises(subprocess.TimeoutExpired):
        run_text_on(machines, _HANGS, timeout_s=2)
    assert left(mark) == []
