"""How far this host's monotonic clock is from rank 0's, so that ranks line up in time.

Ranks of one host share the kernel's clock: their offset is 0, exactly. Between hosts it is measured
by round trips, as NTP does it: rank 0's answer was read somewhere between the question and its
arrival, so the middle is the best guess and half the round trip bounds the error. The shortest of
several round trips is the best one.

Between hosts it is measured once, when the world is made: monotonic clocks drift apart by some
microseconds per second, so after an hour the error is larger than what was measured, by
milliseconds. The record is its own second measurement: no rank leaves an all_reduce before the last
one has entered it, and where stamps of two hosts say otherwise the analysis does not compare them
(`analysis/evidence/timing.py`).

On its own host a rank measures again all the time: `HostClocks` notices that the wall clock was
set or slewed, so that a record's stamps keep their place among logs and torch's dumps, and that the
host was suspended, after which its offset to another host's clock is not known any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

NUM_ROUNDS = 16
MOVED_NS = 1_000_000  # clocks of one host that differ by more than before have moved
_CLOSE_NS = 100_000  # readings that took longer were interrupted
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


@dataclass(frozen=True, slots=True)
class HostTime:
    """One moment by three clocks of a host. `boot_ns` continues while the host is suspended."""

    mono_ns: int
    wall_ns: int
    boot_ns: int

    @classmethod
    def read(cls) -> HostTime | None:
        """Read the clocks together; None if the thread was put aside between them."""
        began = time.monotonic_ns()
        wall = time.time_ns()
        boot = _boot_ns()
        ended = time.monotonic_ns()
        if ended - began > _CLOSE_NS:
            return None
        return cls((began + ended) // 2, wall, ended if boot is None else boot)


class HostClocks:
    """What the clocks of a host did since the last look. Not thread-safe."""

    def __init__(self, mono_ns: int, wall_ns: int) -> None:
        """Begin with a moment by two clocks, read together."""
        self._wall_offset_ns = wall_ns - mono_ns
        self._boot_offset_ns: int | None = None

    def look(self, now: HostTime) -> tuple[bool, bool]:
        """Return whether the wall clock has moved, and whether the host was suspended."""
        wall = now.wall_ns - now.mono_ns
        has_moved = abs(wall - self._wall_offset_ns) > MOVED_NS
        if has_moved:
            self._wall_offset_ns = wall
        boot = now.boot_ns - now.mono_ns
        before, self._boot_offset_ns = self._boot_offset_ns, boot
        return has_moved, before is not None and boot - before > MOVED_NS


def _boot_ns() -> int | None:
    """Return the clock that counts a suspended host's time; None without one (not on Linux)."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime_ns(clock)
