"""Measure other nodes' silence on a clock that stops while this process is not running.

While a launcher is stopped or starved of CPU time, it receives nothing, so all other nodes appear
to be silent. This clock skips such gaps. Leases and permits use real time instead (see
`election.lease`).
"""

from __future__ import annotations

from collections import deque

_KEPT = 64


class LivedTime:
    """A clock that stops while the process is not running.

    The clock does not read the time itself: the caller passes the time to each method, in seconds.

    Args:
        step_s: the longest interval between two ticks that is counted in full, in seconds. Of a
            longer interval, only the first `step_s` seconds are counted.
        now_s: the current time.
    """

    def __init__(self, step_s: float, now_s: float) -> None:
        self._step_s = step_s
        self._last_s = now_s
        self._stood_s = 0.0
        self._gaps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)  # sum at the end

    def tick(self, now_s: float) -> None:
        """Record that the process is running at time `now_s`."""
        begin_s = self._last_s + self._step_s
        if now_s > begin_s:
            self._stood_s += now_s - begin_s
            self._gaps.append((begin_s, now_s, self._stood_s))
        self._last_s = now_s

    def at(self, moment_s: float) -> float:
        """Return the reading of this clock at time `moment_s`."""
        moment_s = min(moment_s, self._last_s + self._step_s)
        stood_s = self._stood_s
        for begin_s, end_s, sum_s in reversed(self._gaps):
            if moment_s >= end_s:
                return moment_s - sum_s
            stood_s = sum_s - (end_s - begin_s)
            if moment_s >= begin_s:
                return begin_s - stood_s
        return moment_s - stood_s

    def since(self, moment_s: float, now_s: float) -> float:
        """Return how many seconds the process ran between `moment_s` and `now_s`."""
        return self.at(now_s) - self.at(moment_s)
