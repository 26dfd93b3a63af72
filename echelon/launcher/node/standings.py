"""Forward to the coordinator what this node's ranks report about `resilient.run`.

Each rank writes its report to a file in its own folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.incident.worker import Worker
from echelon.recorder.continuation import REPLACE, SHRINK, Standing, State, read_standing

_STATES = (State.PROTECTED, State.DONE, State.JOINING)  # by their code in a row


class Standings:
    """The reports of one attempt's ranks.

    Args:
        workers: this node's workers; more workers can be added later.
        tell: a function that sends an event to the coordinator.
    """

    def __init__(
        self, start: m.Start, workers: Sequence[Worker], tell: Callable[[m.Event], None]
    ) -> None:
        self._attempt = start.attempt
        self._is_on = start.on_loss in (SHRINK, REPLACE)
        self._workers = workers
        self._tell = tell
        self._told: dict[int, Standing] = {}

    def forget(self, rank: int) -> None:
        """Discard a lost rank's report before another process takes the rank's place."""
        self._told.pop(rank, None)

    def look(self) -> None:
        """Send the reports that have changed since the previous call."""
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
    """Encode a rank's report as a row of `m.Standings`."""
    age_ns = time.monotonic_ns() - standing.ready_mono_ns
    return [
        rank,
        _STATES.index(standing.state),
        standing.epoch,
        standing.step,
        standing.repeats,
        age_ns // 1_000_000 if standing.ready_mono_ns else -1,
        standing.ready_mono_ns,
        standing.meets,
    ]


def of_row(row: Sequence[int]) -> tuple[int, Standing]:
    """Decode a row of `m.Standings`; return the rank and its report.

    The report contains the time at which the rank became ready, both on this process's clock and on
    the clock of the rank's node.
    """
    rank, code, epoch, step, repeats, age_ms, there_ns, meets = row
    return rank, Standing(
        state=_STATES[code],
        epoch=epoch,
        step=step,
        repeats=repeats,
        ready_mono_ns=0 if age_ms < 0 else time.monotonic_ns() - age_ms * 1_000_000,
        ready_there_ns=there_ns,
        meets=meets,
    )
