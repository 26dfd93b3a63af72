"""Measure the offset from this host's monotonic clock to rank 0's.

Ranks on the same host share the kernel's clock, so the offset between them is 0. Between hosts, the
offset is measured by round trips, as in NTP. Rank 0 reads its clock during the round trip, so the
midpoint of the round trip is the best estimate of that moment, and half of the round-trip time
bounds the error. The shortest round trip is used.

Between hosts, the offset is measured once, when the world is created. Monotonic clocks drift apart
by a few microseconds per second, so the offset becomes inaccurate over time. If stamps contradict
each other, the analysis does not compare them (`analysis/evidence/timing.py`).

`HostClocks` detects changes in the host's own clocks: an adjustment of the wall clock, or a
suspension of the host. After a suspension, the offset to other hosts is unknown.
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
    """The offset from this host's clock to rank 0's.

    Rank 0's time is the local time plus `offset_ns`, with an error of at most `error_ns`.
    """

    offset_ns: int
    error_ns: int


def measure_offset(
    ask: Callable[[], int],
    *,
    num_rounds: int = NUM_ROUNDS,
    now: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Measure the offset to rank 0's clock by making round trips to rank 0.

    Args:
        ask: a function that makes one round trip to rank 0 and returns the reading of rank 0's
            monotonic clock in ns.
        num_rounds: the number of round trips, at least 1.
        now: a function that returns the reading of this host's monotonic clock in ns.
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
    """Readings of a host's three clocks at one moment. `boot_ns` includes suspended time."""

    mono_ns: int
    wall_ns: int
    boot_ns: int

    @classmethod
    def read(cls) -> HostTime | None:
        """Read all three clocks, or return None if the readings are too far apart."""
        began = time.monotonic_ns()
        wall = time.time_ns()
        boot = _boot_ns()
        ended = time.monotonic_ns()
        if ended - began > _CLOSE_NS:
            return None
        return cls((began + ended) // 2, wall, ended if boot is None else boot)


class HostClocks:
    """A detector of changes in a host's clocks between readings. Not thread-safe."""

    def __init__(self, mono_ns: int, wall_ns: int) -> None:
        """Take the first reading of the monotonic and wall clocks."""
        self._wall_offset_ns = wall_ns - mono_ns
        self._boot_offset_ns: int | None = None

    def look(self, now: HostTime) -> tuple[bool, bool]:
        """Return whether the wall clock was adjusted, and whether the host was suspended.

        Both results cover the time since the last call.
        """
        wall = now.wall_ns - now.mono_ns
        has_moved = abs(wall - self._wall_offset_ns) > MOVED_NS
        if has_moved:
            self._wall_offset_ns = wall
        boot = now.boot_ns - now.mono_ns
        before, self._boot_offset_ns = self._boot_offset_ns, boot
        return has_moved, before is not None and boot - before > MOVED_NS


def _boot_ns() -> int | None:
    """Return a reading of the clock that includes suspended time, in ns; None if unavailable."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime_ns(clock)
