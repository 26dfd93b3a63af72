"""Convert the times of device events to the host's monotonic clock.

A reference (`Tie`) is an event whose time on the host's clock is known. The host time of a later
event is the reference's host time plus the time elapsed between the two events. Elapsed times are
float32, so a new reference is recorded periodically to preserve the resolution.
"""

from __future__ import annotations

import time
from typing import Any

from echelon.dist.backends.device.runtime import DeviceRuntime

_TIE_AGAIN_NS = 10_000_000_000  # float32 resolves 1 us over 10 s
_NUM_TRIES = 3  # the host may be held up between an event and its look at the clock

Tie = tuple[Any, int]  # an event and the monotonic time at which it happened


class DeviceClock:
    """A clock that converts the times of one device's events to the host's time."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        """Create a clock for the current device."""
        self._runtime = runtime
        self._stream = runtime.accelerator.Stream()
        self._tie = self._make_tie()

    def tie(self) -> Tie:
        """Return a recent event whose host time is known.

        Call this method before recording an event whose host time will be requested.
        """
        if time.monotonic_ns() - self._tie[1] > _TIE_AGAIN_NS:
            self._tie = self._make_tie()
        return self._tie

    @staticmethod
    def mono_ns(tie: Tie, event: Any) -> int:
        """Return the host time, in nanoseconds, of an event recorded after `tie`; 0 if unknown."""
        happened, at_ns = tie
        try:
            return at_ns + int(1e6 * happened.elapsed_time(event))
        except (RuntimeError, NotImplementedError):  # not every build of a device's torch has it
            return 0

    def _make_tie(self) -> Tie:
        """Record several events and return the one whose host time is known most precisely."""
        ties = []
        with self._runtime.relaxed():
            for _ in range(_NUM_TRIES):
                event = self._runtime.accelerator.Event(enable_timing=True)
                before_ns = time.monotonic_ns()
                event.record(self._stream)
                event.synchronize()
                after_ns = time.monotonic_ns()
                ties.append((after_ns - before_ns, event, after_ns))
        _, event, at_ns = min(ties, key=lambda tie: tie[0])
        return event, at_ns
