"""Laps of a rank, derived from successive looks at its ring's live words. Pure.

The program stores the words one after the other while this reads them, so time that one step spent
may be counted for the next one. The totals are still right: words only grow, and each lap gets what
was added since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launcher.goodput.facts import Lap, Spent
from echelon.recorder.format.schema import Live


class Odometer:
    """The laps of one rank, by the stamps of its own host.

    Attributes:
        unfinished: what the unfinished step has spent so far, as far as it is known.
        step: the present step; -1 for none.
    """

    def __init__(self) -> None:
        self.step = -1
        self.unfinished = Spent()
        self._first_ns = 0
        self._at_ns = 0
        self._spent = (0, 0, 0)

    def read(self, words: Sequence[int]) -> list[Lap]:
        """Read the live words; return the new laps."""
        first_ns = words[Live.FIRST_STEP_MONO_NS]
        self.step = words[Live.STEP] - 1
        if not first_ns or not words[Live.FIRST_STEP]:
            return []
        laps = []
        if (
            first_ns != self._first_ns
        ):  # the first step of the program, or of the rank's next program
            self._first_ns = self._at_ns = first_ns
            self._step = words[Live.FIRST_STEP] - 1
            self._spent = (0, 0, 0)
            laps.append(self._lap(self._step, first_ns, Spent()))
        spent = (words[Live.WAITED_NS], words[Live.CHECKPOINT_NS], words[Live.DATA_NS])
        new = [max(0, now - before) for now, before in zip(spent, self._spent, strict=True)]
        since = Spent(waited_ns=new[0], checkpoint_ns=new[1], data_ns=new[2])
        if words[Live.STEP_MONO_NS] > self._at_ns:
            laps.append(self._lap(self.step, words[Live.STEP_MONO_NS], since))
            self._spent, self.unfinished = spent, Spent()
        else:
            self.unfinished = since
        return laps

    def _lap(self, step: int, at_ns: int, spent: Spent) -> Lap:
        lap = Lap(
            first_step=self._step,
            end_step=max(step, self._step),
            began_ns=self._at_ns,
            ended_ns=at_ns,
            spent=spent,
        )
        self._step, self._at_ns = step, at_ns
        return lap
