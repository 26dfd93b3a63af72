"""How far this host's monotonic clock is from rank 0's, so that ranks line up in time.

Ranks of one host share the kernel's clock: their offset is 0, exactly. Between hosts it is measured
by round trips, as NTP does it: rank 0's answer was read somewhere between the question and its
arrival, so the middle is the best guess and half the round trip bounds the error. The shortest of
several round trips is the best one.

It is measured once, when the world is made: monotonic clocks drift apart by some microseconds per
second, so after an hour the error is larger than what was measured, by milliseconds, and the clock
of a host that was suspended steps. The record is its own second measurement: no rank leaves an
all_reduce before the last one has entered it, and where stamps of two hosts say otherwise the
analysis compares them no more (`analysis/evidence/timing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

NUM_ROUNDS = 16
NOT_MEASURED = -1  # as `Identity.clock_error_ns`


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A stamp of this host lies on rank 0's clock at stamp + offset_ns, within error_ns."""

    offset_ns: int
    error_ns: int


def measure_offset(
    ask: Callable[[], int],
    *,
    num_rounds: int = NUM_ROUNDS,
    now: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Measure the offset to rank 0's clock by round trips.

    Args:
        ask: makes one round trip to rank 0 and returns its monotonic clock, in ns. What it raises
            goes through.
        num_rounds: at least 1.
        now: this host's monotonic clock, in ns.
    """
    best: ClockOffset | None = None
    for _ in range(num_rounds):
        asked = now()
        theirs = ask()
        answered = now()
        error = (answered - asked + 1) // 2
        if best is None or error < best.error_ns:
            best = ClockOffset(theirs - (asked + answered) // 2, error)
    assert best is not None, num_rounds
    return best
