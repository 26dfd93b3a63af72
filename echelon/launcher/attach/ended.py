"""Find the ranks that end while being examined and, if it is still known, how each ended.

The kernel keeps the exit status of an ended process until the parent process waits for it. After
that, only the launcher's output shows how the process ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence

from echelon.analysis.evidence.stacks import main_thread
from echelon.host.procfs import read_text
from echelon.launcher.attach.ranks import FoundRank, started_ticks

_STATE, _STATUS = 0, 49  # fields of /proc/PID/stat after the program's name
_EXIT_S, _LOOK_S = 5.0, 0.1  # how long an interpreter may take to finalise on a busy machine


def begun(ranks: Sequence[FoundRank]) -> dict[int, int]:
    """Return the start time of each rank that is still running, in clock ticks, keyed by rank."""
    return {one.rank: started_ticks(one.pid) for one in ranks if not _has_ended(one.pid)}


def endings(ranks: Sequence[FoundRank], before: Mapping[int, int]) -> dict[int, str]:
    """Return the ranks in `before` that have ended, each with how it ended; "" if unknown."""
    return {
        one.rank: _how(one.pid)
        for one in ranks
        if one.rank in before
        and (_has_ended(one.pid) or started_ticks(one.pid) != before[one.rank])
    }


def is_exiting(stacks: str, later_stacks: str) -> bool:
    """Return whether the main thread seems to be exiting: its last stack has no Python frame.

    While an interpreter is shutting down, its main thread has no Python frame, even if a destructor
    hangs. A torn read of a running process may look the same, so only the process's end is proof.
    """
    main = main_thread(later_stacks or stacks)
    return main is not None and not main.frames


def wait_for_exits(pids: Sequence[int], idle: Callable[[float], None]) -> None:
    """Wait up to five seconds for processes that seem to be exiting."""
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
