"""Entry: what the order knows of one unit."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from echelon.dist.fsdp.order.recording import Recording

UNWATCHED = 0  # a call of which no input has a gradient


class State(enum.Enum):
    """Which of a unit's parameters are in memory.

    SHARDED: this rank's chunks alone. NEAR: also the part that the near ranks need to gather again.
    GATHERING: a gather is under way; the memory of all is taken. WHOLE: all.
    """

    SHARDED = "sharded"
    NEAR = "near"
    GATHERING = "gathering"
    WHOLE = "whole"


class Facts(Protocol):
    """What may change between two events and is read when an event needs it."""

    @property
    def trains(self) -> bool:
        """Whether any parameter requires gradients."""

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter requires no gradient."""

    def trained(self) -> set[Hashable]:
        """Return the parameters that require gradients."""

    def is_stale(self) -> bool:
        """Return whether the shards changed since they were gathered."""

    def has_gradients(self) -> bool:
        """Return whether gradients wait that were not reduced."""


@dataclass(eq=False, kw_only=True)
class Entry:
    """One unit, as the order sees it. It lives as long as its unit: see [Note: ownership].

    Attributes:
        number: of the unit on its group.
        name: for messages.
        num_bytes, gradient_bytes: of the gathered parameters; of the buffer that reduces them.
        depth: how many units ahead of this one are gathered while it computes.
        reshard: whether the unit is released after forward.
        has_near: whether a part of it is kept for the backward's gather.
        outer: whether it contains other units. Such a unit stays whole from the end of its forward
            to its backward if it is the outermost one: it would be gathered again at once.
        borrowed: units that own parameters which this one uses too.
        borrowers: units that use parameters of this one.
        recording: of the forwards in which this unit is the outermost; None: there was none.
        place: by which the units' forwards began in order; -1: none did.
        has_begun: whether a forward began whose backward is not complete.
        ended_at: by which the units' forwards ended in order.
        held: the program unsharded it: it is not released, and no gradient is reduced.
        sync: whether backward reduces its gradients.
        calls: forward calls whose backward has not reached their inputs.
        is_unwatched: whether a forward call had no input whose gradient tells when its backward
            is complete.
        missing: parameters without a gradient in this backward; None: none arrived yet.
    """

    number: int
    name: str
    facts: Facts
    num_bytes: int
    gradient_bytes: int
    depth: int = 2
    reshard: bool = True
    has_near: bool = False
    outer: bool = False
    borrowed: list[Entry] = field(default_factory=list)
    borrowers: weakref.WeakSet[Entry] = field(default_factory=weakref.WeakSet)
    recording: Recording | None = None
    place: int = -1
    has_begun: bool = False
    ended_at: int = -1
    held: bool = False
    sync: bool = True
    state: State = State.SHARDED
    calls: set[int] = field(default_factory=set)
    is_unwatched: bool = False
    missing: set[Hashable] | None = None
    _ended_calls: set[int] = field(default_factory=set)  # in this backward
    _kept_calls: set[int] = field(default_factory=set)  # those of the last backward

    def __repr__(self) -> str:
        return f"unit {self.name!r}"

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces the gradients now."""
        return self.sync and not self.held

    def awaits(self) -> set[Hashable]:
        """Return the parameters whose gradients have not arrived in this backward."""
        if self.missing is None:
            self.missing = self.facts.trained()
        return self.missing

    def begin_call(self, call: int) -> None:
        """Expect the backward of a forward call, unless it is complete in this run of autograd."""
        if call == UNWATCHED:
            self.is_unwatched = True
        elif call in self._kept_calls:  # their graph is gone through again, all of it
            self.calls |= self._kept_calls - self._ended_calls
        elif call not in self._ended_calls:
            self.calls.add(call)

    def end_call(self, call: int) -> None:
        """Note that the backward of a call has reached the unit's inputs."""
        self.calls.discard(call)
        self._ended_calls.add(call)

    def drop_call(self, call: int) -> None:
        """Note that the graph of a call is gone: no backward will reach its inputs."""
        self.calls.discard(call)

    def keep_calls(self) -> None:
        """Expect calls of which the backward is complete once more, if their graph is used again.

        After a run of autograd that yielded gradients of inputs only: with `create_graph` the next
        run goes through the same calls.
        """
        self._kept_calls |= self._ended_calls
        self._ended_calls = set()

    def forget_backward(self) -> None:
        """Prepare for the next backward."""
        self.missing = None
        self.calls.clear()
        self._kept_calls, self._ended_calls = self._ended_calls, set()
        self.is_unwatched = self.has_begun = False
