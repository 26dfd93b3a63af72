"""Record the forward passes of one outermost unit, which is usually a whole model.

[Note: ownership] A unit owns its entry. The entry of an outermost unit owns a recording, which
refers to the entries of the inner units. `Order` itself has only weak references to entries and
recordings, so deleting a model frees all of them.

[Note: models that are deleted] The garbage collector runs at different times on different ranks, so
the ranks' decisions must not depend on which units exist. `Order` stores the *numbers* of the
recordings whose backward pass is incomplete. If there are several recordings, the ranks agree at
the end of an autograd run on which recordings took part in the run. A recording took part if the
run reached it on at least one rank and no rank has deleted it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from echelon.dist.fsdp.order.entry import Entry


@dataclass(eq=False)
class Recording:
    """The record of the forward passes of one outermost unit.

    Attributes:
        number: the outermost unit's number.
        following: for each unit, the unit that the last forward pass requested after it.
        last: the last unit requested in the current forward pass.
        final: the last unit requested in the last complete forward pass.
        begun: the units whose forward passes have begun since the last backward pass.
        ended: the units whose forward passes have ended since the last backward pass.
        begun_before: the units whose forward passes began before the last backward pass.
        partners: the numbers of the recordings that took part in every backward pass of this
            recording; None before the first backward pass.
        unreduced: the units that might have unreduced gradients from earlier backward passes.
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
        """Record that a forward pass needs a unit's parameters."""
        if self.last is not None and self.last is not entry:
            self.following[self.last] = entry
        self.last = entry

    def after(self, entry: Entry) -> list[Entry]:
        """Return up to `entry.depth` units that the last forward pass requested after `entry`."""
        following: list[Entry] = []
        depth = entry.depth
        while len(following) < depth and (due := self.following.get(entry)) is not None:
            following.append(due)
            entry = due
        return following

    def end_forward(self) -> None:
        """Record the end of the outermost forward pass."""
        self.final, self.last = self.last, None

    def is_with(self, other: Recording) -> bool:
        """Return whether this recording and another are expected to share a backward pass."""
        return other is self or (self.partners is not None and other.number in self.partners)

    def wants_reduction(self) -> bool:
        """Return whether gradients of an earlier backward pass still have to be reduced."""
        return any(entry.reduces and entry.facts.has_gradients() for entry in self.unreduced)

    def complete(self, partners: set[int]) -> bool:
        """Record that a backward pass is complete; return whether no gradients are left to reduce.

        Args:
            partners: the numbers of the outermost units that took part in the backward pass.
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
        """Forget all forward passes since the last backward pass."""
        self.last = None
        self.begun, self.ended, self.unreduced = {}, {}, {}


def begun_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units in the order in which their forward passes began."""
    return _merged((one.begun for one in recordings), by="place")


def begun_before_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units whose forward passes began before the last backward pass.

    The units are in the order in which these forward passes began.
    """
    return _merged((one.begun_before for one in recordings), by="place")


def ended_in(recordings: Iterable[Recording]) -> list[Entry]:
    """Return the units in the order in which their forward passes ended."""
    return _merged((one.ended for one in recordings), by="ended_at")


def _merged(parts: Iterable[dict[Entry, None]], by: str) -> list[Entry]:
    found = {entry: None for part in parts for entry in part}
    return sorted(found, key=lambda entry: int(getattr(entry, by)))
