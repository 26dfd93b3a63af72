"""Recording: what the forwards of one outermost unit, usually a whole model, left to be known.

[Note: ownership]
A unit owns its entry, and the entry of an outermost unit owns the recording, which refers to the
entries inside. The order itself refers to all of them weakly. So a model that the program deletes
takes everything along, and a unit inside lives as long as a recording that may ask for it.

[Note: models that are deleted]
The garbage collector runs at other moments on other ranks. Therefore no decision that other ranks
must share may depend on which units exist. The order keeps the *numbers* of the recordings whose
backward is not complete. Where there are several, the ranks agree at the end of a backward which of
them take part in it: those that some rank reached, unless some rank has deleted them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from echelon.dist.fsdp.order.entry import Entry


@dataclass(eq=False)
class Recording:
    """See above.

    Attributes:
        number: the outermost unit's.
        following: the unit that the last forward asked for after each unit.
        last: the unit that was asked for last in the forward that is running.
        final: the unit that the last forward asked for last: its backward begins first.
        begun: forwards that began, and ended: that ended, since the last backward.
        begun_before: those of the last backward.
        partners: numbers of the recordings that took part in every backward of this one; None:
            there was none.
        unreduced: units of earlier backwards, which may have gradients that were not reduced.
    """

    number: int
    following: dict[Entry, Entry] = field(default_factory=dict)
    last: Entry | None = None
    final: Entry | None = None
    begun: dict[Entry, None] = field(default_factory=dict)
    ended: dict[Entry, None] = field(default_factory=dict)
    begun_before: dict[Entry, None] = field(default_factory=dict)
    partners: set[int] | None = None
    unreduced: dict[Entry, None] = field(default_factory=dict)

    def follow(self, entry: Entry) -> None:
        """Note that a forward asks for a unit."""
        if self.last is not None and self.last is not entry:
            self.following[self.last] = entry
        self.last = entry

    def after(self, entry: Entry) -> list[Entry]:
        """Return the units that the last forward asked for after a unit, as many as its depth."""
        following: list[Entry] = []
        depth = entry.depth
        while len(following) < depth and (due := self.following.get(entry)) is not None:
            following.append(due)
            entry = due
        return following

    def end_forward(self) -> None:
        """Note that the outermost forward ended."""
        self.final, self.last = self.last, None

    def is_with(self, other: Recording) -> bool:
        """Return whether a backward of this one is expected to be one of another's too."""
        return other is self or (self.partners is not None and other.number in self.partners)

    def wants_reduction(self) -> bool:
        """Return whether gradients of an earlier backward are to be reduced now."""
        return any(entry.reduces and entry.facts.has_gradients() for entry in self.unreduced)

    def complete(self, partners: set[int]) -> bool:
        """Note that a backward is complete; return whether all units reduced in it.

        Args:
            partners: numbers of the recordings that took part.
        """
        self.partners = partners if self.partners is None else self.partners & partners
        self.unreduced.update(self.begun or self.begun_before)
        reduced = all(entry.reduces for entry in self.unreduced if entry.facts.trains)
        if reduced:
            self.unreduced = {}
        self.begun_before = self.begun or self.begun_before
        self.begun, self.ended = {}, {}
        return reduced

    def forget(self) -> None:
        """Forget all forwards since the last backward."""
        self.last = None
        self.begun, self.ended, self.unreduced = {}, {}, {}


def begun_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units whose forwards began, in this order."""
    return _merged((one.begun for one in recordings), by="place")


def begun_before_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units whose forwards began before the last backward, in this order."""
    return _merged((one.begun_before for one in recordings), by="place")


def ended_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units whose forwards ended, in this order."""
    return _merged((one.ended for one in recordings), by="ended_at")


def _merged(parts: Iterable[dict[Entry, None]], by: str) -> list[Entry]:
    found = {entry: None for part in parts for entry in part}
    return sorted(found, key=lambda entry: int(getattr(entry, by)))
