"""Detect whether ranks without a usable ring made progress between two examinations.

A healthy rank can be inside a collective at both examinations, like a hung rank. However, the main
thread of a healthy rank wakes up repeatedly, whereas a rank that stays in one collective waits only
once. The kernel counts these waits for each thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from echelon.host.procfs import read_text

_WAKES_PER_S = 2.0  # a wait that only checks its deadline wakes less often than a step's waits


@dataclass(frozen=True, slots=True)
class Wakes:
    """The number of times that a main thread has waited, and its processor time in clock ticks."""

    waits: int
    ticks: int


def wakes(pid: int) -> Wakes | None:
    """Return how often a process's main thread has waited, and the thread's processor time.

    Return None if the process has exited.
    """
    status = read_text(f"/proc/{pid}/task/{pid}/status", "status", [])
    stat = read_text(f"/proc/{pid}/task/{pid}/stat", "stat", []).rpartition(")")[2].split()
    _, found, rest = status.partition("\nvoluntary_ctxt_switches:")
    if not found or len(stat) < 13:
        return None
    return Wakes(int(rest.split()[0]), int(stat[11]) + int(stat[12]))


def went_on(before: Wakes | None, after: Wakes | None, elapsed_s: float) -> bool:
    """Return whether a main thread woke up often enough between two samples to imply progress."""
    if before is None or after is None:
        return False
    return after.waits - before.waits > max(2.0, _WAKES_PER_S * elapsed_s)


def share(before: Wakes | None, after: Wakes | None, elapsed_s: float) -> float:
    """Return the fraction of one core that a main thread used between two samples."""
    if before is None or after is None or elapsed_s <= 0:
        return 0.0
    return (after.ticks - before.ticks) / os.sysconf("SC_CLK_TCK") / elapsed_s
