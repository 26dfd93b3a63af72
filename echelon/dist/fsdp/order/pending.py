"""Track recordings of forward passes until their backward passes are complete.

Ranks can delete a recording at different times, so recordings are identified by number. See [Note:
models that are deleted] in `recording.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from echelon.dist.fsdp.order.entry import Entry
from echelon.dist.fsdp.order.recording import Recording
from echelon.dist.fsdp.order.run import Run

_IS_NOT_REACHED, _TAKES_PART, _IS_DELETED = 0, 1, 2


class Pending:
    """The recordings whose backward pass is not yet complete."""

    def __init__(self) -> None:
        self._recordings: dict[int, weakref.ref[Recording]] = {}
        # Those with a unit that the program does not hold: only these gather and reduce.
        self._communicating: set[int] = set()

    def add(self, recording: Recording, entry: Entry) -> None:
        """Record that a backward pass will follow a unit's forward pass."""
        self._recordings[recording.number] = weakref.ref(recording)
        if not entry.held:
            self._communicating.add(recording.number)

    def note_release(self, entry: Entry) -> None:
        """Record that the program no longer keeps a unit gathered."""
        for recording in self.recordings():
            if entry in recording.begun or entry in recording.ended:
                self._communicating.add(recording.number)

    def recordings(self) -> list[Recording]:
        """Return the recordings that still exist."""
        found = [ref() for ref in self._recordings.values()]
        return [one for one in found if one is not None]

    def entries(self) -> set[Entry]:
        """Return the units whose backward pass is not yet complete."""
        return {entry for one in self.recordings() for entry in (*one.begun, *one.ended)}

    def words(self, run: Run) -> list[int]:
        """Return this rank's votes on which recordings take part in an autograd run.

        See `Order.backward_asks`.

        Only recordings whose backward pass uses collectives are put to the vote. If there is at
        most one such recording, the list is empty.
        """
        numbers = sorted(self._communicating)
        return [self._word(number, run) for number in numbers] if len(numbers) > 1 else []

    def _word(self, number: int, run: Run) -> int:
        recording = self._recordings[number]()
        if recording is None:
            return _IS_DELETED
        takes_part = run.reaches(recording) or recording.wants_reduction()
        return _TAKES_PART if takes_part else _IS_NOT_REACHED

    def concerned(self, run: Run, agreed: Sequence[int]) -> list[Recording]:
        """Return the recordings that take part in an autograd run, and forget deleted recordings.

        Args:
            agreed: the votes agreed on by all ranks, or an empty list if there was no vote.
        """
        words = dict(zip(sorted(self._communicating), agreed, strict=False))
        found = []
        for number, ref in list(self._recordings.items()):
            recording = ref()
            word = words.get(number)
            if recording is None or word == _IS_DELETED:
                if word == _IS_DELETED:
                    self._forget(number)
                continue
            is_alone = word is None and number in self._communicating
            if is_alone or word == _TAKES_PART or run.reaches(recording):
                found.append(recording)
        if run.is_again:
            found += [one for one in run.recordings if one not in found and run.reaches(one)]
        return found

    def complete(self, recordings: list[Recording]) -> None:
        """Record that the backward pass through the units in `recordings` is complete."""
        partners = {one.number for one in recordings}
        for recording in recordings:
            if recording.complete(partners):
                self._forget(recording.number)
                continue
            for entry in recording.unreduced:
                self.add(recording, entry)

    def _forget(self, number: int) -> None:
        self._recordings.pop(number, None)
        self._communicating.discard(number)
