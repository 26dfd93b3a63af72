"""Forward the reports of this node's ranks about `resilient.run` to the coordinator.

Each rank writes its report to a file in its own folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.incident.worker import Worker
from echelon.recorder.continuation import SHRINK, Standing, State, read_standing


class Standings:
    """The reports of one attempt's ranks.

    Args:
        workers: this node's workers; more may be added later.
        tell: a function that sends an event to the coordinator.
    """

    def __init__(
        self, start: m.Start, workers: Sequence[Worker], tell: Callable[[m.Event], None]
    ) -> None:
        self._attempt = start.attempt
        self._is_on = start.on_loss == SHRINK
        self._workers = workers
        self._tell = tell
        self._told: dict[int, Standing] = {}

    def look(self) -> None:
        """Send the new reports."""
        if not self._is_on:
            return
        rows = []
        for worker in self._workers:
            standing = read_standing(worker.folder)
            if standing is not None and standing != self._told.get(worker.rank):
                self._told[worker.rank] = standing
                rows.append(to_row(worker.rank, standing))
        if rows:
            self._tell(m.Standings(attempt=self._attempt, ranks=rows))


def to_row(rank: int, standing: Standing) -> list[int]:
    """Encode a standing as an element of `m.Standings`, with an age instead of a time."""
    age_ns = time.monotonic_ns() - standing.ready_mono_ns
    return [
        rank,
        int(standing.state is State.DONE),
        standing.epoch,
        standing.step,
        standing.repeats,
        age_ns // 1_000_000 if standing.ready_mono_ns else -1,
        standing.ready_mono_ns,
    ]


def of_row(row: Sequence[int]) -> tuple[int, Standing]:
    """Decode the rank and the standing in a row, with times on this process's clock."""
    rank, is_done, epoch, step, repeats, age_ms, there_ns = row
    return rank, Standing(
        state=State.DONE if is_done else State.PROTECTED,
        epoch=epoch,
        step=step,
        repeats=repeats,
        ready_mono_ns=0 if age_ms < 0 else time.monotonic_ns() - age_ms * 1_000_000,
        ready_there_ns=there_ns,
    )
