"""Entry: the order's data about one unit."""

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

    SHARDED: only this rank's chunks. NEAR: also the part that the near ranks need to gather again.
    GATHERING: a gather is in progress, and the memory for all is allocated. WHOLE: all.
    """

    SHARDED = "sharded"
    NEAR = "near"
    GATHERING = "gathering"
    WHOLE = "whole"


class Facts(Protocol):
    """Facts that may change between events and are read when an event needs them."""

    @property
    def trains(self) -> bool:
        """Whether any parameter requires gradients."""

    @property
    def has_frozen(self) -> bool:
        """Whether any parameter is frozen."""

    def trained(self) -> set[Hashable]:
        """Return the parameters that require gradients."""

    def is_stale(self) -> bool:
        """Return whether the shards changed since they were gathered."""

    def has_gradients(self) -> bool:
        """Return whether there are gradients that were not reduced."""


@dataclass(eq=False, kw_only=True)
class Entry:
    """One unit in the order. It lives as long as its unit: see [Note: ownership].

    Attributes:
        number: the unit's number on its group.
        name: the unit's name in messages.
        num_bytes, gradient_bytes: size of the gathered parameters; of the buffer that reduces their
            gradients.
        depth: how many units ahead of this one are gathered while it computes.
        reshard: whether the unit is released after forward.
        has_near: whether a part of it is kept for the backward's gather.
        outer: whether it contains other units. The outermost unit stays whole from the end of its
            forward to its backward, because it would be gathered again at once.
        borrowed: units that own parameters that this one also uses.
        borrowers: units that use parameters of this one.
        recording: the recording of the forwards in which this unit is the outermost, or None.
        place: position in the order in which the units' forwards began; -1 if none did.
        has_begun: whether a forward has begun but its backward is not complete.
        ended_at: position in the order in which the units' forwards ended.
        held: whether the program unsharded it, so that it is not released and its gradients are not
            reduced.
        sync: whether the backward reduces its gradients.
        calls: forward calls whose backward has not reached their inputs yet.
        is_unwatched: whether a forward call had no input whose gradient shows when its backward is
            complete.
        missing: parameters without a gradient in this backward; None if no gradient has arrived
            yet.
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
        """Whether a backward currently reduces the gradients."""
        return self.sync and not self.held

    def awaits(self) -> set[Hashable]:
        """Return the parameters whose gradients have not arrived yet in this backward."""
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
        """Record that the backward of a call has reached the unit's inputs."""
        self.calls.discard(call)
        self._ended_calls.add(call)

    def drop_call(self, call: int) -> None:
        """Record that the graph of a call was freed, so that no backward will reach its inputs."""
        self.calls.discard(call)

    def keep_calls(self) -> None:
        """Expect calls with a complete backward again, in case their graph is reused.

        This follows a run of autograd that produced only gradients of inputs: with `create_graph`
        the next run passes through the same calls.
        """
        self._kept_calls |= self._ended_calls
        self._ended_calls = set()

    def forget_backward(self) -> None:
        """Prepare for the next backward."""
        self.missing = None
        self.calls.clear()
        self._kept_calls, self._ended_calls = self._ended_calls, set()
        self.is_unwatched = self.has_begun = False
