"""Gather and release the parameters of one or more modules, usually one block, as a unit."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn

from echelon.dist.fsdp.memory.storage import Memory
from echelon.dist.fsdp.order.entry import Entry, State
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.layout import TAG_BITS
from echelon.dist.fsdp.parameters.marks import attached
from echelon.dist.fsdp.parameters.member import Member
from echelon.dist.fsdp.settings import MixedPrecisionPolicy
from echelon.dist.group import ProcessGroup

_owners: weakref.WeakKeyDictionary[Flat, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


class Unit:
    """A set of modules whose parameters are gathered and released together.

    Args:
        number: the unit's number within its group.
        near: the neighboring ranks that gather the unit again for backward; None means all ranks.
        near_size: how many neighboring ranks the program requested, or 0.
        reshard: whether the unit is released after forward.
        depth: how many units are gathered ahead while this unit computes.

    Attributes:
        entry: the record that `Order` keeps of the unit.
        borrowed: the units whose parameters this unit also uses.
        near: the neighboring ranks that gather the unit again for backward; None means all ranks.
        near_size: how many neighboring ranks the program requested, or 0.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        flats: list[Flat],
        number: int,
        precision: MixedPrecisionPolicy,
        *,
        reshard: bool,
        near: ProcessGroup | None,
        near_size: int = 0,
        depth: int,
    ) -> None:
        self.num_modules = len(modules)  # not the modules: see `Member`
        self.flats = flats
        self.precision = precision
        self.near = near
        self.near_size = near_size
        self.borrowed: list[Unit] = []
        self._version = 0
        for flat in flats:
            _owners[flat] = weakref.ref(self)
        name = type(modules[0]).__name__
        self.entry = self._new_entry(number, name, depth=depth, reshard=reshard)

    def _new_entry(self, number: int, name: str, *, depth: int, reshard: bool) -> Entry:
        return Entry(
            number=number,
            name=name,
            facts=self,
            num_bytes=sum(flat.full_bytes for flat in self.flats),
            gradient_bytes=sum(flat.gradient_bytes for flat in self.flats if flat.trains),
            depth=depth,
            reshard=reshard,
            has_near=self.near is not None,
        )

    def __repr__(self) -> str:
        return repr(self.entry)

    @property
    def number(self) -> int:
        """The unit's number within its group."""
        return self.entry.number

    @property
    def name(self) -> str:
        """The module's path within the outermost sharded module, for error messages."""
        return self.entry.name

    @property
    def state(self) -> State:
        """Which parts of the unit's parameters are in memory."""
        return self.entry.state

    def borrow(self, owners: Sequence[Unit]) -> None:
        """Record that this unit also uses the parameters of other units."""
        for owner in owners:
            self.borrowed.append(owner)
            self.entry.borrowed.append(owner.entry)
            owner.entry.borrowers.add(self.entry)

    def move(
        self,
        group: ProcessGroup,
        replicas: ProcessGroup | None,
        near: ProcessGroup | None,
        number: int,
        flat_numbers: Sequence[int],
        memory: Memory,
    ) -> None:
        """Shard the unit across the ranks of another group. All values become undefined.

        Args:
            group: the ranks to shard the unit across.
            replicas: the ranks that keep copies of this rank's new chunks, or None.
            near: the ranks of the new group that gather the unit again for backward; None means all
                ranks.
            number: the unit's number within the new group.
            flat_numbers: the numbers of the unit's flat vectors within the new group.
            memory: the memory that all flat vectors of the new group share.
        """
        self.near = near
        for flat, its_number in zip(self.flats, flat_numbers, strict=True):
            flat.move(group, replicas, its_number, memory)
            flat.show_shards()
        old = self.entry
        self.entry = self._new_entry(number, old.name, depth=old.depth, reshard=old.reshard)
        self.entry.outer, self.entry.sync = old.outer, old.sync

    def borrow_again(self) -> None:
        """Record the borrowed parameters again, after all units have moved to another group."""
        owners, self.borrowed = self.borrowed, []
        self.borrow(owners)

    def __deepcopy__(self, memo: object) -> Unit:
        """Raise an error, because a copy would share the original's memory."""
        raise ValueError(
            "a sharded model cannot be copied. Copy the model before fully_shard and shard the "
            "copy too; for a moving average, keep clones of model.parameters(), which are the "
            "shards"
        )

    @property
    def device(self) -> torch.device:
        """The device on which the unit is gathered; the CPU for a unit without parameters."""
        return self.flats[0].device if self.flats else torch.device("cpu")

    @property
    def members(self) -> Iterator[Member]:
        """An iterator over the unit's parameters, in the order of the flat vectors."""
        return (member for flat in self.flats for member in flat.members)

    @property
    def trains(self) -> bool:
        """True if any of the unit's parameters requires gradients."""
        return any(flat.trains for flat in self.flats)

    @property
    def has_frozen(self) -> bool:
        """True if any of the unit's parameters is frozen."""
        return any(not member.leaf.requires_grad for member in self.members)

    def trained(self) -> set[Hashable]:
        """Return the parameters that require gradients."""
        return {member for member in self.members if member.leaf.requires_grad}

    # ---- parameters ----

    def start_gather(self, near: ProcessGroup | None = None) -> None:
        """Start gathering the unit from the ranks of `near`, or from all ranks if `near` is None.

        Raises:
            ValueError: a shard was converted or moved.
        """
        for flat in self.flats:
            if near is None:
                flat.start_gather()
            else:
                flat.start_regather(near)
        if near is None:
            self._version = self._versions()

    def finish_gather(self) -> None:
        """Block until a gather in progress is complete.

        Raises:
            CollectiveError: a rank was lost, did not join, or is gathering a different unit.
        """
        for flat in self.flats:
            flat.wait()

    def wait(self) -> None:
        """Block until all parameters are in memory, and make the modules use them.

        Raises:
            CollectiveError: a rank was lost, did not join, or is gathering a different unit.
            ValueError: the program replaced a parameter.
        """
        self.finish_gather()
        for flat in self.flats:
            flat.show_leaves()

    def is_stale(self) -> bool:
        """Return whether shards have changed since they were gathered."""
        return self._version != self._versions() or not all(
            member.shard_is_ours() for member in self.members
        )

    def release(self, near: ProcessGroup | None = None) -> None:
        """Release the gathered parameters, except for the range retained for neighboring ranks."""
        for flat in self.flats:
            flat.release(near)
            flat.show_shards()

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of parameters that this unit owns or borrows."""
        return any(
            flat.has_memory_of(tensor) for unit in (self, *self.borrowed) for flat in unit.flats
        )

    def has_tag(self, tag: int) -> bool:
        """Return whether a tag, decoded by `tag_of`, identifies a flat vector of this unit."""
        return any(flat.number % (1 << TAG_BITS) == tag for flat in self.flats)

    def has_gradients(self) -> bool:
        """Return whether the unit has gradients that have not been reduced."""
        return any(member.has_gradient for member in self.members)

    def check_step(self) -> None:
        """Check that the shards are ready for an optimizer's step.

        Raises:
            ValueError: gradients have not been reduced, the program holds the full parameters, or
                a shard was converted or moved.
        """
        if self.has_gradients():
            raise ValueError(
                f"{self} has gradients that were not reduced: run the last backward pass outside "
                "gradient_sync(model, enabled=False), or call reduce_gradients()"
            )
        if self.entry.held:
            raise ValueError(f"{self} is unsharded: call reshard() before the optimizer's step")
        self.adopt()

    def adopt(self) -> None:
        """Copy values that the program assigned with `shard.data = values` into the chunks.

        Raises:
            ValueError: a shard was converted or moved.
        """
        for flat in self.flats:
            flat.adopt()

    def _versions(self) -> int:
        return sum(member.shard._version for member in self.members)


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that `fully_shard` created for a module, or None for other modules."""
    unit: Unit | None = attached(module)
    return unit


def owner_of(member: Member) -> Unit:
    """Return the unit that owns a parameter."""
    unit = _owners[member.flat]()
    assert unit is not None, member
    return unit


def units_of(module: nn.Module) -> list[Unit]:
    """Return the units in a module, in the order of the module's submodules."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))
