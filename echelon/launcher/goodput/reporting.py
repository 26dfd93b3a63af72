"""Report the laps (runs of consecutive steps) of this node's ranks to the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.goodput.facts import Lap, Spent
from echelon.launcher.goodput.odometer import Odometer
from echelon.launcher.incident.worker import Worker
from echelon.recorder.format.schema import Live

_NODES_PER_S = 32  # nodes that may report: a coordinator of thousands of ranks has other work


class LapReports:
    """The laps (ranges of steps) of this node's workers in one attempt, reported periodically.

    Args:
        words: a function that returns the counters in a rank's ring (its live words), or None if
            the rank has no ring.
    """

    def __init__(
        self,
        start: m.Start,
        workers: Sequence[Worker],
        words: Callable[[Worker], Sequence[int] | None],
    ) -> None:
        self._attempt = start.attempt
        self._every_s = max(1.0, start.num_nodes / _NODES_PER_S)
        self._workers = workers
        self._words = words
        self._odometers: dict[int, Odometer] = {}
        self._laps: dict[int, list[Lap]] = {}
        self._last: dict[int, Sequence[int]] = {}
        self._due_s = 0.0

    def look(self) -> m.Laps | None:
        """Read the rings of the live ranks; return a report, or None if no report is due."""
        for worker in self._workers:
            if worker.alive:
                self.read(worker)
        return self.report() if time.monotonic() >= self._due_s else None

    def read(self, worker: Worker) -> None:
        """Read the ring of one rank. Call this once more after the rank has ended."""
        words = self._words(worker)
        if words is None:
            return
        self._last[worker.rank] = words
        odometer = self._odometers.setdefault(worker.rank, Odometer())
        laps = self._laps.setdefault(worker.rank, [])
        for lap in odometer.read(words):
            if laps and laps[-1].end_step == lap.first_step and laps[-1].end_step > 0:
                laps[-1] = laps[-1].joined(lap)
            else:
                laps.append(lap)

    def report(self) -> m.Laps | None:
        """Return all ranks' laps (ranges of steps) since the last report.

        The result is None if no rank has a ring.
        """
        if not self._last:
            return None
        self._due_s = time.monotonic() + self._every_s
        now = time.monotonic_ns()
        laps = [_row(rank, lap, now) for rank, laps in self._laps.items() for lap in laps]
        self._laps.clear()
        ranks = [self._state(rank, words, now) for rank, words in self._last.items()]
        return m.Laps(attempt=self._attempt, laps=laps, ranks=ranks)

    def _state(self, rank: int, words: Sequence[int], now: int) -> list[int]:
        progress_ns = words[Live.PROGRESS_MONO_NS]
        odometer = self._odometers[rank]
        return [
            rank,
            odometer.step,
            (now - progress_ns) // 1_000_000 if progress_ns else -1,
            words[Live.SAVED_STEP] - 1,
            words[Live.NUM_LOADS],
            *_of_spent(odometer.unfinished),
        ]


def _row(rank: int, lap: Lap, now: int) -> list[int]:
    ages = [(now - lap.began_ns) // 1000, (now - lap.ended_ns) // 1000]
    return [rank, lap.first_step, lap.end_step, *ages, *_of_spent(lap.spent)]


def _of_spent(spent: Spent) -> list[int]:
    return [ns // 1000 for ns in (spent.waited_ns, spent.checkpoint_ns, spent.data_ns)]
