"""Carry out the decisions of `Order` for the units of one group.

Each group over which units are sharded has one driver. The driver reports events to `order.Order`
and carries out the actions that `Order` returns. Gradients are reduced in a separate group, so
that gathers and reductions never wait for each other.

The driver has only weak references to the units and their memory, so deleting a model frees them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from echelon.dist.fsdp.memory.storage import Memory
from echelon.dist.fsdp.order import actions as act
from echelon.dist.fsdp.order.budget import Size
from echelon.dist.fsdp.order.order import Order
from echelon.dist.fsdp.parameters.layout import tag_of
from echelon.dist.fsdp.parameters.member import Member
from echelon.dist.fsdp.parameters.unit import Unit
from echelon.dist.fsdp.step.reducer import Reducer
from echelon.dist.fsdp.uncompiled import uncompiled
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.absent import is_absent
from echelon.errors import CollectiveError

_SHAPE = re.compile(r"\[(\d+(?:, \d+)+)\]")
_drivers: weakref.WeakKeyDictionary[Unit, weakref.ref[Driver]] = weakref.WeakKeyDictionary()


def driver_of(unit: Unit) -> Driver:
    """Return the driver of a unit."""
    driver = _drivers[unit]()
    assert driver is not None, unit  # it lives as long as its group
    return driver


class _Run:
    """An object that autograd keeps alive until the end of one of its runs.

    If an exception ends the run, the driver is notified when this object is deleted.
    """

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends

    def end(self) -> None:
        """Notify the driver that the autograd run has ended."""
        self._ends()


class Driver:
    """The driver of one group's units. Steps must run on one thread at a time.

    Attributes:
        group: the group for gathers.
        reducing: a group of the same ranks, for reductions.
        replicas: the ranks that hold the same chunk as this rank, or None.
        order: the `Order`, which decides what to gather, release and reduce.
        units: the units, keyed by number.
        sizes: the sizes of the units, keyed by number. Some of these units might no longer exist.
        hashes: the running hashes of the order of gathers and of the order of reductions.
        on_event: a function that is called before each forward pass of a unit and on each event of
            a backward pass, or None. It runs on the training thread, or on an autograd thread while
            the training thread waits.
    """

    def __init__(self, group: ProcessGroup, replicas: ProcessGroup | None) -> None:
        self.group = group
        self.replicas = replicas
        self.reducing = group
        if group.size > 1 and not is_absent(group):
            self.reducing = group.split(0, group.rank, f"{group.name}/reduce")
        self.order = Order()
        self.units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
        self.sizes: dict[int, Size] = {}
        self._memory: weakref.ref[Memory] | None = None
        self.hashes = {"gather": 0, "reduce": 0}
        self._near: dict[int, ProcessGroup] = {}
        self._prepared: set[tuple[ProcessGroup, torch.device]] = set()
        self.on_event: Callable[[], None] | None = None
        self._num_flats = self._num_units = 0
        self._reducer: Reducer | None = None  # of the reductions under way
        self._run: weakref.ref[_Run] | None = None
        self._end_run = uncompiled(_Run.end)

    # ---- making ----

    def add(self, unit: Unit) -> None:
        """Add a unit to this driver."""
        self._num_units += 1
        self.units[unit.number] = unit
        self.order.add(unit.entry)
        _drivers[unit] = weakref.ref(self)

    def measure(self, unit: Unit) -> None:
        """Include a unit's size in the calculation of the memory budget."""
        entry = unit.entry
        self.sizes[unit.number] = Size(
            entry.num_bytes, entry.gradient_bytes, entry.depth, entry.outer
        )
        self.order.budget.measure(self.sizes.values())

    def keep_sizes(self, numbers: Iterable[int]) -> None:
        """Count only the sizes of the given units towards the memory budget."""
        self.sizes = {number: self.sizes[number] for number in sorted(numbers)}
        if not self.sizes:
            self.order.budget.num_bytes = None

    @property
    def memory(self) -> Memory:
        """The memory that the units share, which is freed together with the last unit."""
        memory = None if self._memory is None else self._memory()
        if memory is None:
            memory = Memory(lambda: self.order.budget.third)
            self._memory = weakref.ref(memory)
        return memory

    def next_unit(self) -> int:
        """Return the number to assign to the next unit."""
        return self._num_units

    def next_flat(self) -> int:
        """Reserve and return the number of the next flat vector."""
        self._num_flats += 1
        return self._num_flats - 1

    def near(self, size: int) -> ProcessGroup:
        """Return a group of `size` neighbors that includes this rank.

        Collective on the first call per size.
        """
        if is_absent(self.group):
            return self.group  # until the unit moves; it refuses all operations
        if size not in self._near:
            color = self.group.rank // size
            name = f"{self.group.name}/near{size}"
            self._near[size] = self.group.split(color, self.group.rank, name)
        return self._near[size]

    def prepare(self, device: torch.device) -> None:
        """Make every group create its device communicators before the first step. Collective.

        Otherwise a group would create its communicator in the middle of a step, where this might
        block.
        """
        for group in self.groups():
            if device.type != "cpu" and group.size > 1 and (group, device) not in self._prepared:
                self._prepared.add((group, device))
                group.all_reduce(torch.zeros(1, device=device))

    def groups(self) -> list[ProcessGroup]:
        """Return the groups in which other ranks might be waiting for this rank."""
        every = [self.group, self.reducing, self.replicas, *self._near.values()]
        return [group for group in every if group is not None]

    # ---- events ----

    def is_nested(self, unit: Unit) -> bool:
        """Return whether a unit's forward pass is running inside an outer unit's forward pass."""
        return self.order.is_nested(unit.entry)

    def is_at_work(self, unit: Unit) -> bool:
        """Return whether a backward pass or this unit's forward pass is running."""
        _ = self.in_backward
        return self.order.is_at_work(unit.entry)

    @property
    def in_backward(self) -> bool:
        """True during a backward pass through the units."""
        if self._run is not None and self._run() is None:
            self._fail()
        return self.order.in_backward

    def before_forward(self, unit: Unit, *, trains: bool) -> None:
        """Gather a unit's parameters before its forward pass.

        Args:
            unit: the unit whose forward pass is about to begin.
            trains: whether a backward pass can follow.
        """
        self._note_event()
        with self._failing():
            _ = self.in_backward
            records = torch.is_grad_enabled()
            self._do(self.order.forward_begins(unit.entry, records=records, trains=trains))

    def after_forward(self, unit: Unit, *, has_graph: bool) -> None:
        """Release a unit's parameters after its forward pass, or keep them for backpropagation."""
        with self._failing():
            _ = self.in_backward
            self._do(self.order.forward_ends(unit.entry, has_graph=has_graph))

    def outputs_have_gradients(self, unit: Unit, call: int | None) -> None:
        """Gather the parameters of the unit that autograd is about to enter."""
        with self._failing():
            self._enter_backward()
            self._do(self.order.outputs_have_gradients(unit.entry, call))

    def gradient_arrives(self, unit: Unit, member: Member) -> None:
        """Process a parameter's newly computed gradient."""
        with self._failing():
            self._enter_backward()
            self._do(self.order.gradient_arrives(unit.entry, member))

    def inputs_have_gradients(self, unit: Unit, call: int) -> None:
        """Record that the backward pass of a forward call has reached the call's inputs.

        If the unit's backward pass is now complete, release the unit and reduce its gradients.
        """
        with self._failing():
            self._enter_backward()
            self._do(self.order.inputs_have_gradients(unit.entry, call))

    def _note_event(self) -> None:
        if self.on_event is not None:
            self.on_event()

    def _enter_backward(self) -> None:
        self._note_event()
        if self.in_backward:
            return
        self._do(self.order.backward_begins())
        run = _Run(self._end_backward)
        self._run = weakref.ref(run, self._died)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._end_run, run))

    def _died(self, run: weakref.ref[_Run]) -> None:
        """Clean up after an exception in autograd's engine."""
        if self._run is run:
            self._fail()

    def _end_backward(self) -> None:
        with self._failing():
            words = self.order.backward_asks()
            self._do(self.order.backward_ends(self._agree(words) if words else ()))
            if self.order.in_backward:
                self._do(self.order.backward_completes())
            self._run = None

    # ---- by hand ----

    def gather(self, units: Iterable[Unit]) -> None:
        """Start gathering units."""
        with self._failing():
            self._do(self.order.gather([unit.entry for unit in units]))

    def hold(self, units: Iterable[Unit]) -> None:
        """Gather units, and keep them gathered until the program releases them."""
        with self._failing():
            self._do(self.order.hold([unit.entry for unit in units]))

    def release(self, units: Iterable[Unit]) -> None:
        """Release units, including units that the program holds."""
        with self._failing():
            self._do(self.order.release([unit.entry for unit in units]))

    def reduce(self, units: Iterable[Unit]) -> None:
        """Reduce the gradients of full parameters."""
        with self._failing():
            self._reducer = None
            self._do(self.order.reduce([unit.entry for unit in units]))

    # ---- actions ----

    def _agree(self, words: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of all ranks' votes. Collective."""
        with self._explaining("agreeing on the models that a backward reached"):
            unit = next(iter(self.units.values()))
            agreed = torch.tensor(words, dtype=torch.int64, device=unit.device)
            for group in (self.reducing, self.replicas):
                if group is not None and group.size > 1:
                    group.all_reduce(agreed, op="max")
            result: list[int] = agreed.tolist()
        return result

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Report any exception in the block to `Order`, and re-raise it."""
        try:
            yield
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        self._run = self._reducer = None
        self.order.fail()

    def _do(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._do_one(action)

    def _do_one(self, action: act.Action) -> None:
        match action:
            case act.Collect(member=Member() as member):
                self._reductions().collect(member)
            case act.SetAside(member=Member() as member):
                member.set_aside()
            case act.Gather(entry, near):
                self._gather(self.units[entry.number], near)
            case act.Wait(entry):
                unit = self.units[entry.number]
                with self._explaining(f"gathering {unit}"):
                    unit.wait()
            case act.Release(entry, keep_near):
                unit = self.units[entry.number]
                unit.release(unit.near if keep_near else None)
            case act.Reduce(entry):
                unit = self.units[entry.number]
                with self._explaining(f"reducing the gradients of {unit}"):
                    self._reductions().start(unit)
            case act.Finish(entry):
                unit = self.units[entry.number]
                with self._explaining(f"reducing the gradients of {unit}"):
                    self._reductions().finish_first(unit)
            case act.Exchange():
                with self._explaining("reducing the last gradients"):
                    self._reductions().finish(list(self.hashes.values()))
                self._reducer = None
            case act.Abandon(entry):
                self._abandon(self.units[entry.number])
            case act.Trim(all_buffers):
                self._trim(all_buffers)
            case _:
                raise AssertionError(action)

    def _gather(self, unit: Unit, near: bool) -> None:
        self._note("gather", unit.number)
        with self._explaining(f"gathering {unit}"):
            unit.start_gather(unit.near if near else None)

    def _abandon(self, unit: Unit) -> None:
        with contextlib.suppress(CollectiveError):  # the next gather reports it
            unit.finish_gather()
            unit.release()
        for member in unit.members:
            member.drop_gradient()

    def _trim(self, all_buffers: bool) -> None:
        if all_buffers:
            self.memory.pool.clear()
            self._reducer = None
        self.memory.pages.trim()

    def _reductions(self) -> Reducer:
        if self._reducer is None:
            pool = self.memory.pool
            self._reducer = Reducer(pool, self.reducing, self.replicas, self._note)
        return self._reducer

    def _note(self, what: str, number: int) -> None:
        """Add an operation to the running hash of gathers or of reductions."""
        self.hashes[what] = zlib.crc32(f"{what} {number}".encode(), self.hashes[what])

    # ---- errors ----

    @contextlib.contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """Name the units involved and the current action in the text of a `CollectiveError`."""
        try:
            yield
        except CollectiveError as err:
            text = _SHAPE.sub(self._named, str(err))
            err.args = (f"{text}; while {doing}", *err.args[1:])
            raise err from None

    def _named(self, found: re.Match[str]) -> str:
        tag = tag_of([int(length) for length in found[1].split(",")])
        units = [one for one in self.units.values() if one.has_tag(tag)]
        return f" of {' or '.join(map(repr, units))}" if units else found[0]
