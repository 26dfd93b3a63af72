"""Driver: decides when the units of one group are gathered, released and reduced.

One for each group that units are sharded over. It records in which order forwards ask for units,
and gathers the next ones ahead of time, to a depth and up to a number of bytes. What is gathered
ahead depends on these records alone, never on timing, so that all ranks do the same. Gradients are
reduced in a group of their own, so that neither kind of collective waits behind the other.

[Note: when a step fails]
An exception leaves forwards that began and did not end, or a backward that never reached its end.
The next forward of such a unit finds that, and the driver starts over: gathers under way are waited
for (the other ranks started them too), everything is released, and gradients that were not reduced
are dropped. The program goes on with `optimizer.zero_grad()` and the next batch. After an error of
a collective the group itself is of no use any more, and says so.
"""

from __future__ import annotations

import contextlib
import re
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from echelon.dist.fsdp.backward import Backward
from echelon.dist.fsdp.layout import tag_of
from echelon.dist.fsdp.pages import Pages
from echelon.dist.fsdp.storage import Pool
from echelon.dist.fsdp.unit import State, Unit
from echelon.dist.group import ProcessGroup
from echelon.errors import CollectiveError

AHEAD_BYTES = 1 << 30
_SHAPE = re.compile(r"\[(\d+(?:, \d+)+)\]")


class Driver:
    """See above. Not thread-safe: one thread runs forward and backward at a time.

    Attributes:
        group: gathers. reducer: the same ranks; reduces.
        replicas: the ranks that hold what I hold; None: nobody does.
        hashes: of the gathers and of the reductions so far, each in their order. How the two kinds
            alternate may depend on which parameters a rank used.
    """

    def __init__(self, group: ProcessGroup, replicas: ProcessGroup | None) -> None:
        self.group = group
        self.replicas = replicas
        self.reducer = group
        if group.size > 1:
            self.reducer = group.split(0, group.rank, f"{group.name}/reduce")
        self.units: list[Unit] = []
        self.pool = Pool()
        self.pages = Pages()
        self.hashes = {"gather": 0, "reduce": 0}
        self._near: dict[int, ProcessGroup] = {}
        self._num_flats = 0
        self._open: list[Unit] = []
        self._last: Unit | None = None
        self._next: dict[Unit, Unit] = {}
        self._final: Unit | None = None  # asked for last: its backward comes first
        self._place: dict[Unit, int] = {}
        self._ahead: set[Unit] = set()
        self._ended: list[Unit] = []
        self._begun: dict[Unit, None] = {}
        self._begun_before: list[Unit] = []  # of the last backward
        self._backward: Callable[[], Backward | None] | None = None
        self._failed = False

    # ---- making ----

    def add(self, unit: Unit) -> int:
        """Take a unit in; return its number."""
        self.units.append(unit)
        return len(self.units) - 1

    def next_flat(self) -> int:
        """Return a number for a flat."""
        self._num_flats += 1
        return self._num_flats - 1

    def near(self, size: int) -> ProcessGroup:
        """Return my group of `size` neighbouring ranks. Collective when it is new."""
        if size not in self._near:
            color = self.group.rank // size
            name = f"{self.group.name}/near{size}"
            self._near[size] = self.group.split(color, self.group.rank, name)
        return self._near[size]

    # ---- forward ----

    def is_nested(self, unit: Unit) -> bool:
        """Return whether a unit's forward is running inside an outer unit's."""
        return not self._failed and unit in self._open and self._open[0] is not unit

    def before_forward(self, unit: Unit, *, trains: bool) -> None:
        """Gather a unit's parameters; `trains`: a backward may follow."""
        backward = self.running()
        if backward is not None:  # activations are computed again
            backward.enters(unit)
            return
        if self._failed or self._backward is not None or unit in self._open:
            self.start_over()
        self._open.append(unit)
        # A reentrant checkpoint runs forwards without gradients inside an outer unit's.
        trains = torch.is_grad_enabled() or (trains and self._open[0] in self._begun)
        if trains and unit not in self._begun:
            self._place[unit] = len(self._begun)
            self._begun[unit] = None
        for one in (*unit.borrowed, unit):
            self._ask(one)

    def after_forward(self, unit: Unit, *, has_graph: bool) -> None:
        """Release a unit's parameters, or keep them for its backward."""
        if self.running() is not None:
            return
        if unit in self._open:
            del self._open[self._open.index(unit) :]
        if has_graph:
            if unit in self._ended:
                self._ended.remove(unit)
            self._ended.append(unit)
        at_end = not self._open
        kept = unit.held or (has_graph and (unit is self._final or (unit.outer and at_end)))
        if at_end:
            self._final = self._last
            self._last = None
        if unit.reshard and not kept and not self._is_lent(unit):
            unit.release(for_backward=has_graph)
        for owner in unit.borrowed:
            in_use = owner.held or owner in self._open or self._is_lent(owner)
            if owner.reshard and not in_use:
                owner.release(for_backward=has_graph)
        if at_end and not has_graph:
            self.pages.trim()

    def _is_lent(self, unit: Unit) -> bool:
        """Whether a forward that is running uses parameters of a unit beside the unit's own."""
        return any(unit in running.borrowed for running in self._open)

    # ---- gathering ----

    def start_gather(self, unit: Unit) -> None:
        """Begin to gather a unit, and note it."""
        if unit.state in (State.SHARDED, State.NEAR):
            self.note("gather", unit.number)
            unit.start_gather()

    def start_ahead(self, unit: Unit, following: Sequence[Unit]) -> None:
        """Begin to gather what comes after a unit, as far as its depth and the limit allow."""
        self._ahead.discard(unit)
        for due in following[: unit.depth]:
            lent = sum(one.full_bytes for one in self._ahead)
            fits = not lent or lent + due.full_bytes <= AHEAD_BYTES
            if due.state in (State.SHARDED, State.NEAR) and fits:
                self._ahead.add(due)
                self.start_gather(due)

    def note(self, what: str, number: int) -> None:
        """Add a gather or a reduction to the hash of their order."""
        self.hashes[what] = zlib.crc32(f"{what} {number}".encode(), self.hashes[what])

    # ---- backward ----

    def running(self) -> Backward | None:
        """Return the backward that autograd is in."""
        return None if self._backward is None or self._failed else self._backward()

    def enter_backward(self) -> Backward:
        """Return the backward that autograd is in; the first call of it makes it."""
        backward = self.running()
        if backward is None:
            if self._failed or self._backward is not None:
                self.start_over()
            is_again = not self._begun
            begun = list(self._begun) or self._begun_before
            backward = Backward(self, self._ended, begun, is_again=is_again)
            self._begun_before = begun
            self._ended, self._begun, self._last = [], {}, None
            self._backward = weakref.ref(backward)
            # The engine alone holds it: see `Backward`.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(backward.finish)
        return backward

    def expect_again(self, ended: list[Unit], begun: list[Unit]) -> None:
        """Take back what a backward without gradients did not get to."""
        self._ended = ended + [unit for unit in self._ended if unit not in ended]
        self._begun = dict.fromkeys([*begun, *self._begun])
        self._backward = None

    def end_backward(self) -> None:
        """Release everything that nobody holds, and be ready for the next step."""
        self._backward = None
        self._ahead.clear()
        for unit in self.units:
            unit.forget_backward()
            if not unit.held:
                unit.release()
        self.pages.trim()

    def place(self, unit: Unit) -> int:
        """Return a number by which the units' forwards began in order."""
        return self._place.get(unit, -1)

    # ---- failures ----

    def explain(self, err: CollectiveError, doing: str) -> CollectiveError:
        """Say in an error's text which units the ranks were at, in place of their shapes."""

        def name(found: re.Match[str]) -> str:
            tag = tag_of([int(length) for length in found[1].split(",")])
            units = [one for one in self.units if one.has_tag(tag)]
            return f" of {' or '.join(map(repr, units))}" if units else found[0]

        err.args = (f"{_SHAPE.sub(name, str(err))}; while {doing}", *err.args[1:])
        return err

    def fail(self) -> None:
        """Note that a hook raised: the next forward starts over."""
        self._failed = True

    def start_over(self) -> None:
        """Forget a step that did not end; see the note above."""
        self._failed = False
        self._backward = None
        self._open, self._ended, self._begun, self._last = [], [], {}, None
        self._ahead.clear()
        self.pool.clear()
        for unit in self.units:
            with contextlib.suppress(CollectiveError):  # the next gather will say it
                unit.release()
            unit.held = False
            unit.forget_backward()
            for member in unit.members:
                member.drop_gradient()
        self.pages.trim()

    # ---- recording ----

    def _ask(self, unit: Unit) -> None:
        if unit.state is State.WHOLE and unit.is_stale():
            unit.release()
        self.start_gather(unit)
        if self._last is not None and self._last is not unit:
            self._next[self._last] = unit
        self._last = unit
        self.start_ahead(unit, self._following(unit))
        unit.wait()

    def _following(self, unit: Unit) -> list[Unit]:
        following: list[Unit] = []
        while len(following) < unit.depth and (due := self._next.get(unit)) is not None:
            following.append(due)
            unit = due
        return following
