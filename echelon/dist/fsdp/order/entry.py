"""Define the record that `Order` keeps of each unit."""

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
    """The parts of a unit's parameters that are in memory on this rank.

    SHARDED: only this rank's chunks are in memory. NEAR: the range that this rank contributes to a
    gather among neighboring ranks is also in memory. GATHERING: a gather is in progress, and
    memory for all parameters is allocated. WHOLE: all parameters are in memory.
    """

    SHARDED = "sharded"
    NEAR = "near"
    GATHERING = "gathering"
    WHOLE = "whole"


class Facts(Protocol):
    """Properties of a unit that can change between the events that `Order` handles."""

    @property
    def trains(self) -> bool:
        """True if any parameter requires gradients."""

    @property
    def has_frozen(self) -> bool:
        """True if any parameter is frozen."""

    def trained(self) -> set[Hashable]:
        """Return the parameters that require gradients."""

    def is_stale(self) -> bool:
        """Return whether the shards have changed since they were gathered."""

    def has_gradients(self) -> bool:
        """Return whether the unit has gradients that have not been reduced."""


@dataclass(eq=False, kw_only=True)
class Entry:
    """The record that `Order` keeps of one unit; see [Note: ownership] in `recording.py`.

    Attributes:
        number: the unit's index within its group.
        name: the unit's name in error messages.
        num_bytes: the size of the gathered parameters.
        gradient_bytes: the size of the buffer used to reduce the gradients.
        depth: how many units are gathered ahead while this unit computes.
        reshard: whether the unit is released after forward.
        has_near: whether a range of the unit remains in memory after forward, for the gather among
            neighboring ranks in backward.
        outer: whether the unit contains other units.
        borrowed: the units whose parameters this unit also uses.
        borrowers: the units that use this unit's parameters.
        recording: the recording of the forward passes of an outermost unit; None for an inner unit.
        place: the position of this unit in the order in which forward passes started; -1 if its
            forward pass has not started.
        has_begun: whether a forward pass has started since the last complete backward pass.
        ended_at: the position of this unit in the order in which forward passes ended.
        held: whether the program holds the unit in memory. If so, training steps neither release
            it nor reduce its gradients.
        sync: whether the backward pass reduces the unit's gradients.
        calls: the numbers of the forward calls whose backward pass is not complete.
        is_unwatched: whether the end of some call's backward pass cannot be observed, because none
            of the call's inputs requires a gradient.
        missing: the parameters without a gradient in this backward pass; None if no gradient has
            arrived yet.
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
        """True if a backward pass would now reduce the gradients."""
        return self.sync and not self.held

    def awaits(self) -> set[Hashable]:
        """Return the parameters that have not received a gradient in this backward pass yet."""
        if self.missing is None:
            self.missing = self.facts.trained()
        return self.missing

    def begin_call(self, call: int) -> None:
        """Record that a forward call awaits its backward pass, unless that pass is complete."""
        if call == UNWATCHED:
            self.is_unwatched = True
        elif call in self._kept_calls:  # their graph is gone through again, all of it
            self.calls |= self._kept_calls - self._ended_calls
        elif call not in self._ended_calls:
            self.calls.add(call)

    def end_call(self, call: int) -> None:
        """Record that the backward pass of a call has reached the unit's inputs."""
        self.calls.discard(call)
        self._ended_calls.add(call)

    def drop_call(self, call: int) -> None:
        """Record that a call's graph was freed, which rules out a backward pass."""
        self.calls.discard(call)

    def keep_calls(self) -> None:
        """Allow completed calls to run backward again, in case their graph is reused.

        This method is called after an autograd run that produced only gradients of inputs.
        """
        self._kept_calls |= self._ended_calls
        self._ended_calls = set()

    def forget_backward(self) -> None:
        """Discard the state of the last backward pass, in preparation for the next one."""
        self.missing = None
        self.calls.clear()
        self._kept_calls, self._ended_calls = self._ended_calls, set()
        self.is_unwatched = self.has_begun = False
