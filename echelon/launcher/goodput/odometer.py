"""Derive a rank's laps (runs of steps) from its ring's live words, which are counters.

If the program updates the counters while they are being read, some time might be attributed to the
next lap. The totals are still correct, because each lap counts the increase since the previous lap.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launcher.goodput.facts import Lap, Spent
from echelon.recorder.format.schema import Live


class Odometer:
    """A reader of one rank's laps (runs of steps), with timestamps from the rank's own host.

    Attributes:
        unfinished: the times recorded so far for the unfinished step.
        step: the current step; -1 before the first step.
    """

    def __init__(self) -> None:
        self.step = -1
        self.unfinished = Spent()
        self._first_ns = 0
        self._at_ns = 0
        self._spent = (0, 0, 0)

    def read(self, words: Sequence[int]) -> list[Lap]:
        """Process a reading of the ring's live words; return the new laps."""
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
