"""Detect ranks that end while a job is being examined, and determine how each of them ended.

The kernel keeps the exit status of a process until its parent reaps the process. After that, only
the launcher's output shows how the process ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from echelon.analysis.evidence.stacks.frames import main_thread
from echelon.host.procfs import read_text
from echelon.launcher.attach.ranks import FoundRank, started_ticks

_STATE, _STATUS = 0, 49  # fields of /proc/PID/stat after the program's name
_EXIT_S, _LOOK_S = 5.0, 0.1  # how long an interpreter may take to finalize on a busy machine


def begun(ranks: Sequence[FoundRank]) -> dict[int, int]:
    """Return the start times of running ranks, in clock ticks since boot, keyed by rank."""
    return {one.rank: started_ticks(one.pid) for one in ranks if not _has_ended(one.pid)}


def endings(ranks: Sequence[FoundRank], before: Mapping[int, int]) -> dict[int, str]:
    """Return how each rank in `before` has ended, keyed by rank; "" means unknown.

    Ranks that are still running are left out.
    """
    return {
        one.rank: _how(one.pid)
        for one in ranks
        if one.rank in before
        and (_has_ended(one.pid) or started_ticks(one.pid) != before[one.rank])
    }


def is_exiting(stacks: str, later_stacks: str) -> bool:
    """Return whether the main thread's latest stack suggests that the process is exiting.

    During interpreter shutdown, the main thread has no Python frame. An inconsistent read of a
    running process's stack can look the same.
    """
    main = main_thread(later_stacks or stacks)
    return main is not None and not main.frames


def wait_for_exits(pids: Sequence[int], idle: Callable[[float], None]) -> None:
    """Wait up to five seconds for all of the given processes to end."""
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
    if not status:  # exit code 0, or not permitted to read it
        return ""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    try:
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    except ValueError:
        return f"killed by signal {os.WTERMSIG(status)}"


def _fields(pid: int) -> list[str]:
    return read_text(f"/proc/{pid}/stat", "stat", []).rpartition(")")[2].split()
