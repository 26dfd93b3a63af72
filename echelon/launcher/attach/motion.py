"""Detect whether the ranks of an unrecorded job made progress between two examinations.

The ranks of a healthy job may also be inside collectives both times. What distinguishes a hung
rank from a healthy one is how often its main thread woke up. The kernel counts how often a thread
yields its core to wait, and a rank that stays in one collective does so only once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from echelon.host.procfs import read_text

_WAKES_PER_S = 2.0  # a wait that only checks its deadline wakes less often than a step's waits


@dataclass(frozen=True, slots=True)
class Wakes:
    """How often a process's main thread has waited, and the processor time it has used."""

    waits: int
    ticks: int


def wakes(pid: int) -> Wakes | None:
    """Count how often a process's main thread has waited; None if the process is gone."""
    status = read_text(f"/proc/{pid}/task/{pid}/status", "status", [])
    stat = read_text(f"/proc/{pid}/task/{pid}/stat", "stat", []).rpartition(")")[2].split()
    _, found, rest = status.partition("\nvoluntary_ctxt_switches:")
    if not found or len(stat) < 13:
        return None
    return Wakes(int(rest.split()[0]), int(stat[11]) + int(stat[12]))


def went_on(before: Wakes | None, after: Wakes | None, elapsed_s: float) -> bool:
    """Return whether a thread that was waiting both times made progress in between."""
    if before is None or after is None:
        return False
    return after.waits - before.waits > max(2.0, _WAKES_PER_S * elapsed_s)


def share(before: Wakes | None, after: Wakes | None, elapsed_s: float) -> float:
    """Return the share of a core that a main thread used between two samples."""
    if before is None or after is None or elapsed_s <= 0:
        return 0.0
    return (after.ticks - before.ticks) / os.sysconf("SC_CLK_TCK") / elapsed_s
