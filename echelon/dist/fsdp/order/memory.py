"""Track which units are in memory and which reductions have buffers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from echelon.dist.fsdp.order.actions import Action, Exchange, Finish, Gather, Reduce, Release, Wait
from echelon.dist.fsdp.order.budget import Budget
from echelon.dist.fsdp.order.entry import Entry, State


class Residency:
    """The record of which units are in memory, and the actions emitted for the current event.

    Attributes:
        budget: the memory budget.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._actions: list[Action] = []
        self._ahead: weakref.WeakSet[Entry] = weakref.WeakSet()

    def emit(self, action: Action) -> None:
        """Append an action to the actions of the current event."""
        self._actions.append(action)

    def take(self) -> list[Action]:
        """Return and clear the current event's actions."""
        actions, self._actions = self._actions, []
        return actions

    def clear(self) -> None:
        """Drop the current event's actions, and forget which units were gathered ahead of use."""
        self._actions.clear()
        self._ahead.clear()

    @property
    def ahead_bytes(self) -> int:
        """The total size in bytes of the units that have been gathered ahead of their use."""
        return sum(entry.num_bytes for entry in self._ahead)

    def gather(self, entry: Entry) -> None:
        """Start gathering a unit unless it is already in memory."""
        if entry.state in (State.SHARDED, State.NEAR):
            self.emit(Gather(entry, near=entry.state is State.NEAR))
            entry.state = State.GATHERING

    def gather_ahead(self, entry: Entry, following: Sequence[Entry]) -> None:
        """Start gathering the first `entry.depth` units of `following`, within the budget.

        The method stops at the first unit that exceeds the budget.
        """
        self.note_use(entry)
        for due in following[: entry.depth]:
            if due.state not in (State.SHARDED, State.NEAR):
                continue
            if not self.budget.allows_ahead(self.ahead_bytes, due.num_bytes):
                return
            self._ahead.add(due)
            self.gather(due)

    def note_use(self, entry: Entry) -> None:
        """Record that a unit is in use, so that it no longer counts as gathered ahead."""
        self._ahead.discard(entry)

    def wait(self, entry: Entry) -> None:
        """Gather a unit if necessary, and block until its parameters are in memory."""
        if entry.state is not State.WHOLE:
            self.gather(entry)
            self.emit(Wait(entry))
            entry.state = State.WHOLE

    def release(self, entry: Entry, *, for_backward: bool = False) -> None:
        """Release a unit after waiting for any gather in progress."""
        if entry.state is State.SHARDED:
            return
        if entry.state is State.GATHERING:
            self.wait(entry)
        keep_near = for_backward and entry.has_near
        self.emit(Release(entry, keep_near=keep_near))
        entry.state = State.NEAR if keep_near else State.SHARDED
        self._ahead.discard(entry)

    def release_ahead(self) -> None:
        """Release units that were gathered in advance and are no longer needed."""
        for entry in sorted(self._ahead, key=lambda one: one.number):
            if not entry.held:
                self.release(entry)
        self._ahead.clear()


class Reductions:
    """The reductions of one autograd run, limited by the memory budget."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._under_way: deque[Entry] = deque()

    def begin(self, entry: Entry) -> None:
        """Start reducing a unit's gradients.

        If the budget requires it, older reductions are completed first.
        """
        budget = self._residency.budget
        while not budget.allows_reduction(
            [one.gradient_bytes for one in self._under_way], entry.gradient_bytes
        ):
            self._residency.emit(Finish(self._under_way.popleft()))
        self._residency.emit(Reduce(entry))
        self._under_way.append(entry)

    def complete(self) -> None:
        """Complete all reductions; see `Exchange`."""
        self._under_way.clear()
        self._residency.emit(Exchange())
