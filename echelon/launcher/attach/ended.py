"""Ranks that ended while they were looked at, and how, where the kernel still tells.

An ended process keeps its exit status until its parent has asked for it. Afterwards it is gone, and
only its launcher's output says how it ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from echelon.analysis.evidence.stacks import main_thread
from echelon.host.procfs import read_text
from echelon.launcher.attach.ranks import FoundRank, started_ticks

_STATE, _STATUS = 0, 49  # fields of /proc/PID/stat behind the program's name
_EXIT_S, _LOOK_S = 5.0, 0.1  # how long an interpreter that finalises may take, on a busy machine


def begun(ranks: Sequence[FoundRank]) -> dict[int, int]:
    """Return when each rank's process began, in clock ticks; those that have ended are left out."""
    return {one.rank: started_ticks(one.pid) for one in ranks if not _has_ended(one.pid)}


def endings(ranks: Sequence[FoundRank], before: Mapping[int, int]) -> dict[int, str]:
    """Return the ranks whose process has ended since `begun`, and how: "" if that is not known."""
    return {
        one.rank: _how(one.pid)
        for one in ranks
        if one.rank in before
        and (_has_ended(one.pid) or started_ticks(one.pid) != before[one.rank])
    }


def is_exiting(stacks: str, later_stacks: str) -> bool:
    """Tell whether a main thread had no Python frame when it was seen last.

    An interpreter that finalises looks so, for good if a destructor hangs, and so may a torn look
    at a process that runs: only its end proves it.
    """
    main = main_thread(later_stacks or stacks)
    return main is not None and not main.frames


def wait_for_exits(pids: Sequence[int], idle: Callable[[float], None]) -> None:
    """Let processes that seem to exit do so, for five seconds at most."""
    for _ in range(int(_EXIT_S / _LOOK_S)):
        if all(_has_ended(pid) for pid in pids):
            return
        idle(_LOOK_S)


def _has_ended(pid: int) -> bool:
    fields = _fields(pid)
    return not fields or fields[_STATE] in ("Z", "X")


def _how(pid: int) -> str:
    fields = _fields(pid)
    if len(fields) <= _STATUS or fields[_STATE] != "Z" or not fields[_STATUS].isdigit():
        return ""
    status = int(fields[_STATUS])
    if not status:  # exit code 0, or not permitted to know
        return ""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    try:
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    except ValueError:
        return f"killed by signal {os.WTERMSIG(status)}"


def _fields(pid: int) -> list[str]:
    return read_text(f"/proc/{pid}/stat", "stat", []).rpartition(")")[2].split()
