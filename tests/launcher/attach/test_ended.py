"""A rank that exits during the look is distinguished from one that hangs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.launcher.attach.ended import is_exiting, wait_for_exits

_NONE = "Thread 0x00007f652bdd2b80 [holds the interpreter's lock] (most recent call first):\n"
_SOME = _NONE + '  File "/home/user/train.py", line 23 in <module>\n'


@pytest.mark.parametrize(
    ("before", "after", "exits"),
    [
        (_SOME, _NONE, True),
        (_SOME, _SOME, False),
        (_NONE, _NONE, True),
        (_NONE, "", True),
        (_NONE, _SOME, False),
        (_SOME, "", False),  # the second look failed
        ("", "", False),
    ],
)
def test_a_main_thread_without_a_frame_may_be_exiting(before, after, exits):
    assert is_exiting(before, after) == exits


@pytest.mark.ranks
def test_what_seems_to_exit_is_waited_for_and_no_longer_than_five_seconds():
    waited: list[float] = []
    wait_for_exits([], waited.append)
    assert waited == []
    wait_for_exits([os.getpid()], waited.append)
    assert sum(waited) == pytest.approx(5.0)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
    ) as one:
        waited.clear()

        def idle(seconds: float) -> None:
            waited.append(seconds)
            if not one.stdin.closed:
                one.stdin.write("\\n")
                one.stdin.close()
            os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)

        wait_for_exits([one.pid], idle)
    assert (len(waited), one.returncode) == (1, 0)
