"""A clock that stands still while its process does: by it, the silence of others is measured.

A launcher that is stopped, suspended with its machine, or starved hears nothing, and all the others
then look silent. What it did not live through is its own standstill and no evidence against them.
Leases and permits are measured otherwise (`election.lease`): there, real time has to count.
"""

from __future__ import annotations

from collections import deque

_KEPT = 64


class LivedTime:
    """Pure: the time is handed in, at each `tick` and each question, in seconds of any one clock.

    Args:
        step_s: between two ticks at most so much counts; what is beyond it was a standstill.
    """

    def __init__(self, step_s: float, now_s: float) -> None:
        self._step_s = step_s
        self._last_s = now_s
        self._stood_s = 0.0
        self._gaps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)  # sum at the end

    def tick(self, now_s: float) -> None:
        """Note that the process runs."""
        begin_s = self._last_s + self._step_s
        if now_s > begin_s:
            self._stood_s += now_s - begin_s
            self._gaps.append((begin_s, now_s, self._stood_s))
        self._last_s = now_s

    def at(self, moment_s: float) -> float:
        """Return what this clock shows at a moment, present or past."""
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
        """Return how long the process has run since a moment."""
        return self.at(now_s) - self.at(moment_s)
