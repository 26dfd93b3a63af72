"""Test the clock that does not count pauses of the process, and actions during a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from tests.support.moments import lived_s, once_inside

_SLEEPER = """
import sys, time
from tests.support.moments import lived_s
began_s, since_s = lived_s(), time.monotonic()
print(flush=True)
sys.stdin.readline()
print(lived_s() - began_s, time.monotonic() - since_s)
"""


def test_time_in_which_a_process_is_stopped_does_not_count():
    command = [sys.executable, "-c", _SLEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        since_s = time.monotonic()
        time.sleep(0.4)
        stopped_s = time.monotonic() - since_s
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate(b"\n", timeout=60)
    lived, passed = (float(word) for word in out.split())
    assert lived <= passed - stopped_s + 0.05, (lived, passed, stopped_s)


def test_time_in_which_a_process_runs_counts():
    began_s = lived_s()
    deadline_s = time.monotonic() + 60
    while lived_s() - began_s < 0.2:
        assert time.monotonic() < deadline_s, "it does not count"
        time.sleep(0.01)


def test_an_act_happens_inside_the_call():
    acted, seen = threading.Event(), []

    def blocking_call():
        seen.append(acted.is_set())
        return acted.wait(60)

    thread = once_inside("blocking_call", acted.set, after_s=0.0)
    assert blocking_call()
    assert seen == [False]
    thread.join(60)
