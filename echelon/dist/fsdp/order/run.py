"""Handle one autograd run through sharded units.

Two rules ensure that all ranks start the same collectives in the same order:

* Units are gathered in the reverse of the order in which their forward passes *ended*. A request
  for a unit also gathers the units before it in this order.
* Gradients are reduced in the reverse of the order in which forward passes *began*. A unit that is
  ready waits for the units before it in this order.

A unit's parameters are released after autograd has computed the gradients of all of these
parameters or of all of the unit's inputs. If a unit has frozen parameters and its inputs need no
gradients, the unit is released at the end of the run. A run that computes only gradients of inputs
(the first half of a split backward pass) neither releases nor reduces anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from echelon.dist.fsdp.order.actions import Collect, SetAside
from echelon.dist.fsdp.order.entry import Entry, State
from echelon.dist.fsdp.order.memory import Reductions, Residency
from echelon.dist.fsdp.order.recording import Recording


class Run:
    """One autograd run through the units.

    Args:
        recordings: the recordings of the outermost units that might take part.
        ended: the units whose forward passes ended since the last run, sorted by when they ended.
        begun: the units whose forward passes began since the last run, sorted by when they began.
        is_again: whether this run repeats the last run through retained graphs. If so, `begun` is
            taken from the last run, and units that this run does not reach are skipped.

    Attributes:
        recordings: the recordings that can take part or, after `finish`, that took part.
        is_again: whether this run repeats the last run.
    """

    def __init__(
        self,
        residency: Residency,
        recordings: list[Recording],
        ended: list[Entry],
        begun: Sequence[Entry],
        *,
        is_again: bool,
    ) -> None:
        self.recordings = recordings
        self._residency = residency
        self.is_again = is_again
        self._to_gather = ended[::-1]
        self._expected = [entry for entry in reversed(begun) if entry.facts.trains]
        self._over: set[Entry] = set()
        self._entered: set[Entry] = set()  # units whose outputs have their gradients
        self._inside: set[Entry] = set()  # those whose backward is not complete; maybe once more
        self._arrived: set[Entry] = set()  # units of which a parameter has its gradient
        self._reductions = Reductions(residency)

    @property
    def yields_nothing(self) -> bool:
        """True if gradients are expected but none have arrived."""
        return not self._arrived and bool(self._expected)

    def keep_rest(self) -> None:
        """For the next run, retain only the units that this run has not gathered.

        This method is called after a run that computed no parameter gradients.
        """
        for recording in self.recordings:
            recording.ended = {one: None for one in recording.ended if one in self._to_gather}

    def reaches(self, recording: Recording) -> bool:
        """Return whether autograd has reached any unit whose forward pass is in `recording`."""
        units = (*recording.begun, *recording.ended)
        if self.is_again:
            units = (*units, *recording.begun_before)
        return any(entry in self._entered or entry in self._arrived for entry in units)

    def enters(self, entry: Entry) -> None:
        """Gather the parameters of the unit that autograd is about to enter."""
        for one in (*entry.borrowed, entry):
            self._entered.add(one)
            self._needs(one)
        self._inside.update(one for one in entry.borrowed if one not in self._over)
        self._inside.add(entry)  # with a reentrant checkpoint each use of it is entered by itself

    def arrived(self, entry: Entry, member: Hashable) -> None:
        """Record a parameter's newly computed gradient.

        Raises:
            RuntimeError: the unit's parameters were not in memory, so the gradient is wrong.
        """
        check_whole(entry, f"the gradient of {member}")
        self._arrived.add(entry)
        if entry in self._over:  # again, through another graph
            self._over.discard(entry)
            entry.missing = None
            if entry not in self._expected:
                self._expect(entry)
        entry.awaits().discard(member)
        kind = Collect if entry.reduces else SetAside
        self._residency.emit(kind(entry, member))
        self.look(entry, passed=False)

    def look(self, entry: Entry, *, passed: bool) -> None:
        """Release a unit and reduce its gradients if its backward pass is complete.

        Args:
            passed: whether autograd has computed the gradients of the unit's inputs.
        """
        if entry.calls or self._is_lent(entry) or not self._is_complete(entry, passed=passed):
            return
        self._over.add(entry)
        self._inside.discard(entry)
        # Frozen parameters have no gradient that tells when the last use of them is over.
        if not entry.held and not (entry.is_unwatched and entry.facts.has_frozen):
            self._residency.release(entry)
        self._reduce_ready()
        for owner in entry.borrowed:
            if owner not in self._over or owner.state is State.WHOLE:
                self.look(owner, passed=not owner.is_unwatched)

    def finish(self, recordings: list[Recording]) -> None:
        """Reduce the remaining gradients and complete all reductions.

        Args:
            recordings: the recordings that take part in this autograd run.
        """
        self.recordings = recordings
        ended = {entry for one in recordings for entry in one.ended}
        for entry in self._to_gather:  # the other ranks may have needed it
            if entry in ended:
                self._residency.gather(entry)
        self._to_gather = []
        reached = self._entered | self._over | self._arrived
        if not self.is_again:
            reached.update(entry for one in recordings for entry in one.begun)
        self._expected = [entry for entry in self._expected if entry in reached]
        for entry in sorted(
            {entry for one in recordings for entry in one.unreduced}, key=lambda one: one.number
        ):
            is_known = entry in self._over or entry in self._expected
            if not is_known and entry.facts.has_gradients():
                self._expect(entry)
        self._over.update(self._expected)
        self._reduce_ready()
        self._reductions.complete()

    def _needs(self, entry: Entry) -> None:
        if entry in self._to_gather:
            place = self._to_gather.index(entry)
            for due in self._to_gather[: place + 1]:
                self._residency.gather(due)
            del self._to_gather[: place + 1]
        self._residency.gather(entry)
        self._residency.gather_ahead(entry, self._after(entry))
        self._residency.wait(entry)
        is_known = entry in self._expected or entry in self._over
        if not is_known and entry.facts.trains:
            self._expect(entry)

    def _after(self, entry: Entry) -> list[Entry]:
        """Return the units that autograd is expected to reach after a unit.

        If several recordings can take part in this run, the result contains only units from
        recordings that have always taken part in the same backward passes as the unit's own.
        """
        if len(self.recordings) == 1:
            return self._to_gather
        own = [one for one in self.recordings if entry in one.ended]
        likely = [two for two in self.recordings if any(one.is_with(two) for one in own)]
        return list(
            itertools.takewhile(
                lambda due: any(due in one.ended for one in likely),
                self._to_gather[: entry.depth],
            )
        )

    def _is_complete(self, entry: Entry, *, passed: bool) -> bool:
        """Return whether the backward pass of a unit is complete on this rank.

        It is complete once every parameter that needs a gradient has received one. If `passed` is
        set (autograd has computed the gradients of the unit's inputs), it is also complete once a
        parameter of any unit has received a gradient in this run of autograd. A unit that borrows
        parameters is complete only if `passed` is set.
        """
        if not passed and entry.borrowed:
            return False  # what it borrowed is not among what it awaits
        # A run that yields no gradient at all computes those of inputs only. Which parameters of
        # this unit got one may differ between ranks, so that must not decide.
        return not entry.awaits() or (passed and bool(self._arrived))

    def _is_lent(self, entry: Entry) -> bool:
        """Return whether autograd is inside another unit that uses this unit's parameters."""
        return any(one in self._inside for one in entry.borrowers)

    def _expect(self, entry: Entry) -> None:
        self._expected.append(entry)
        self._expected.sort(key=lambda one: one.place, reverse=True)

    def _reduce_ready(self) -> None:
        while self._expected and self._expected[0] in self._over:
            entry = self._expected.pop(0)
            if entry.reduces:
                self._reductions.begin(entry)


def check_whole(entry: Entry, what: str) -> None:
    """Check that a unit's parameters are in memory.

    Raises:
        RuntimeError: the parameters are not in memory, so the gradient just computed is wrong.
    """
    if entry.state is not State.WHOLE:
        raise RuntimeError(
            f"{what} was computed while {entry} was sharded: a tensor left the unit without "
            "being one of its outputs. Return the tensor from forward, or call unshard() "
            "before backward"
        )
