"""Measure the silence of other nodes with a clock that stops while this process is not running.

A launcher receives nothing while it is stopped, starved, or suspended along with its machine, so
all other nodes look silent. Such a gap says something about the launcher, not about the other
nodes. Leases and permits use real time instead (`election.lease`).
"""

from __future__ import annotations

from collections import deque

_KEPT = 64


class LivedTime:
    """A clock that stops while the process is not running.

    Pure: the caller passes the time to every method, in seconds.

    Args:
        step_s: the longest time, in seconds, that counts as running time between two ticks. Any
            time beyond that is not counted.
        now_s: the current time.
    """

    def __init__(self, step_s: float, now_s: float) -> None:
        self._step_s = step_s
        self._last_s = now_s
        self._stood_s = 0.0
        self._gaps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)  # sum at the end

    def tick(self, now_s: float) -> None:
        """Record that the process is running at this time."""
        begin_s = self._last_s + self._step_s
        if now_s > begin_s:
            self._stood_s += now_s - begin_s
            self._gaps.append((begin_s, now_s, self._stood_s))
        self._last_s = now_s

    def at(self, moment_s: float) -> float:
        """Return this clock's reading now, or at a given earlier time."""
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
        """Return how many seconds the process has run since an earlier time."""
        return self.at(now_s) - self.at(moment_s)
