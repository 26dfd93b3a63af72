"""Unit: what is gathered and released together, usually one block of the model."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from echelon.dist.fsdp.flat import Flat, Member
from echelon.dist.fsdp.layout import TAG_BITS
from echelon.dist.fsdp.settings import MixedPrecisionPolicy
from echelon.dist.group import ProcessGroup
from echelon.errors import CollectiveError

if TYPE_CHECKING:
    from echelon.dist.fsdp.driver import Driver


UNWATCHED = 0  # a call of which no input has a gradient


class State(enum.Enum):
    """Which parameters are in memory.

    SHARDED: my chunks alone. NEAR: also what the ranks near me need from me to gather again.
    GATHERING: a gather is under way; the memory of all is taken. WHOLE: all.
    """

    SHARDED = "sharded"
    NEAR = "near"
    GATHERING = "gathering"
    WHOLE = "whole"


class Unit:
    """Modules whose parameters come and go together.

    Attributes:
        name: the module's path once an outer module is sharded too; for messages.
        near: the ranks among which the unit is gathered again for backward; None: all.
        reshard: whether the unit is released after forward.
        outer: whether it contains other units. Such a one is whole from its forward to the end of
            its backward: releasing it in between would gather it again at once.
        borrowed: units that own parameters which this one uses too.
        borrowers: units that use parameters of this one.
        held: `unshard` was called: nothing is released, and no gradient reduced, until told.
        sync: whether backward reduces the gradients.
        depth: how many units ahead of this one are gathered while it computes.
        calls: forward calls whose backward has not reached their inputs.
        is_unwatched: whether a forward call had no input whose gradient tells when its backward
            is over.
        missing: members without a gradient in this backward; None: none has come yet.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        flats: list[Flat],
        driver: Driver,
        precision: MixedPrecisionPolicy,
        *,
        reshard: bool,
        near: ProcessGroup | None,
        depth: int,
    ) -> None:
        self.modules = modules
        self.flats = flats
        self.driver = driver
        self.precision = precision
        self.reshard = reshard
        self.near = near
        self.depth = depth
        self.name = type(modules[0]).__name__
        self.outer = False
        self.borrowed: list[Unit] = []
        self.borrowers: list[Unit] = []
        self.held = False
        self.sync = True
        self.state = State.SHARDED
        self.calls: set[int] = set()
        self._ended_calls: set[int] = set()  # in this backward
        self._kept_calls: set[int] = set()  # those of the last backward
        self.is_unwatched = False
        self.missing: set[Member] | None = None
        self._version = 0
        for flat in flats:
            flat.unit = self
        self.number = driver.add(self)

    def __repr__(self) -> str:
        return f"unit {self.name!r}"

    def __deepcopy__(self, memo: object) -> Unit:
        """Refuse: a copy would share the collectives and the memory of the original."""
        raise ValueError(
            "a sharded model cannot be copied. Copy it before fully_shard and shard the copy too; "
            "for a moving average, keep clones of model.parameters(), which are the shards"
        )

    @property
    def members(self) -> Iterator[Member]:
        """All parameters, in the order of the vectors."""
        return (member for flat in self.flats for member in flat.members)

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters in the dtype of the computation, padding included."""
        return sum(flat.full_bytes for flat in self.flats)

    @property
    def trains(self) -> bool:
        """Whether any of its parameters wants gradients."""
        return any(flat.trains for flat in self.flats)

    @property
    def has_frozen(self) -> bool:
        """Whether any of its parameters gets no gradient."""
        return any(not member.leaf.requires_grad for member in self.members)

    # ---- parameters ----

    def start_gather(self) -> None:
        """Begin to gather, if that has not begun."""
        if self.state in (State.WHOLE, State.GATHERING):
            return
        near = self.near if self.state is State.NEAR else None
        try:
            for flat in self.flats:
                if near is None:
                    flat.start_gather()
                else:
                    flat.start_regather(near)
        except CollectiveError as err:
            raise self.driver.explain(err, f"gathering {self}") from None
        self.state = State.GATHERING

    def wait(self) -> None:
        """Block until all parameters are there, and let the modules see them.

        Raises:
            CollectiveError: a rank is lost or did not come, or gathers another unit.
        """
        if self.state is State.WHOLE:
            return
        self.start_gather()
        try:
            for flat in self.flats:
                flat.wait()
        except CollectiveError as err:
            raise self.driver.explain(err, f"gathering {self}") from None
        for flat in self.flats:
            flat.show_leaves()
        self.state = State.WHOLE
        self._version = self._versions()

    def is_stale(self) -> bool:
        """Whether shards were changed since they were gathered."""
        return self._version != self._versions()

    def release(self, *, for_backward: bool = False) -> None:
        """Give the gathered parameters' memory back. A gather under way is waited for."""
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait()
        near = self.near if for_backward else None
        for flat in self.flats:
            flat.release(near)
            flat.show_shards()
        self.state = State.SHARDED if near is None else State.NEAR

    def has_tag(self, tag: int) -> bool:
        """Whether a collective's shape with this tag is of one of the flats."""
        return any(flat.number % (1 << TAG_BITS) == tag for flat in self.flats)

    # ---- one backward ----

    def awaits(self) -> set[Member]:
        """Return the members whose gradients have not come in this backward."""
        if self.missing is None:
            self.missing = {member for member in self.members if member.leaf.requires_grad}
        return self.missing

    def forget_backward(self) -> None:
        """Be ready for the next backward."""
        self.missing = None
        self.calls.clear()
        self._kept_calls, self._ended_calls = self._ended_calls, set()
        self.is_unwatched = False

    def begin_call(self, call: int) -> None:
        """Expect the backward of a forward call, unless it is over in this run of autograd."""
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

    def has_gradients(self) -> bool:
        """Whether autograd left gradients that were not reduced."""
        return any(member.has_gradient for member in self.members)

    def before_step(self) -> None:
        """Be ready for an optimizer's step, which changes the shards.

        Raises:
            ValueError: gradients were not reduced, or the parameters are held.
        """
        if self.has_gradients():
            raise ValueError(
                f"{self} has gradients that were not reduced: do the last backward outside of "
                "gradient_sync(model, enabled=False), or call reduce_gradients()"
            )
        if self.held:
            raise ValueError(f"{self} is unsharded: call reshard() before the optimizer's step")
        self.release()

    def _versions(self) -> int:
        return sum(member.shard._version for member in self.members)


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that a module is (one of) the top of."""
    unit: Unit | None = module.__dict__.get("_echelon_unit")
    return unit


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units in a module, in the order of its modules."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))
