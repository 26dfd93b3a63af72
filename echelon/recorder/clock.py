"""Measure the offset between this host's monotonic clock and rank 0's, to align ranks in time.

Ranks on the same host share the kernel's clock, so their offset is exactly 0. Between hosts, the
offset is measured by round trips, as in NTP. Rank 0 read its clock at some moment between the
request and the arrival of the response, so the midpoint is the best estimate, and half of the round
trip bounds the error. The shortest of several round trips is used.

Between hosts, the offset is measured once, when the world is created. Monotonic clocks drift apart
by some microseconds per second, so after an hour the actual error exceeds the measured error by
milliseconds. The record itself provides a second measurement, because no rank leaves an all_reduce
before the last rank has entered it. If the stamps of two hosts contradict that, the analysis does
not compare them (`analysis/evidence/timing.py`).

On its own host, a rank measures continuously. `HostClocks` detects when the wall clock is set or
slewed, so that a record's stamps still line up with logs and torch's dumps. It also detects when
the host is suspended. After a suspension, the offset to another host's clock is no longer known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

NUM_ROUNDS = 16
MOVED_NS = 1_000_000  # clocks of one host whose difference changes by more have moved
_CLOSE_NS = 100_000  # readings that took longer were interrupted
NOT_MEASURED = -1  # as `Identity.clock_error_ns`


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The offset to rank 0's clock.

    Rank 0's reading is the local reading plus `offset_ns`, to within `error_ns`.
    """

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
        ask: a function that makes one round trip to rank 0 and returns rank 0's monotonic clock in
            ns. Its exceptions propagate.
        num_rounds: the number of round trips, at least 1.
        now: a function that returns this host's monotonic clock in ns.
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


@dataclass(frozen=True, slots=True)
class HostTime:
    """One moment on three clocks of a host. `boot_ns` keeps running while the host is suspended."""

    mono_ns: int
    wall_ns: int
    boot_ns: int

    @classmethod
    def read(cls) -> HostTime | None:
        """Read the clocks together, or return None if the thread was preempted in between."""
        began = time.monotonic_ns()
        wall = time.time_ns()
        boot = _boot_ns()
        ended = time.monotonic_ns()
        if ended - began > _CLOSE_NS:
            return None
        return cls((began + ended) // 2, wall, ended if boot is None else boot)


class HostClocks:
    """A detector of changes in a host's clocks between observations. Not thread-safe."""

    def __init__(self, mono_ns: int, wall_ns: int) -> None:
        """Start from one moment, read on the monotonic clock and on the wall clock."""
        self._wall_offset_ns = wall_ns - mono_ns
        self._boot_offset_ns: int | None = None

    def look(self, now: HostTime) -> tuple[bool, bool]:
        """Return (wall clock changed, host suspended), both since the last call."""
        wall = now.wall_ns - now.mono_ns
        has_moved = abs(wall - self._wall_offset_ns) > MOVED_NS
        if has_moved:
            self._wall_offset_ns = wall
        boot = now.boot_ns - now.mono_ns
        before, self._boot_offset_ns = self._boot_offset_ns, boot
        return has_moved, before is not None and boot - before > MOVED_NS


def _boot_ns() -> int | None:
    """Return the clock that includes suspended time, or None if the system has no such clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime_ns(clock)
