"""Define the actions that `Order` returns and the driver carries out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from echelon.dist.fsdp.order.entry import Entry


@dataclass(frozen=True, slots=True)
class Gather:
    """Start gathering a unit's parameters. If `near` is set, only neighbouring ranks take part."""

    entry: Entry
    near: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until a unit's parameters are in memory, and make the unit's modules use them."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Release:
    """Release a unit's parameters. If `keep_near` is set, keep the part for neighbouring ranks."""

    entry: Entry
    keep_near: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Add a gradient to its unit's reduction."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep a gradient on this rank without reducing it."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing a unit's gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Finish:
    """Block until this unit's reduction, the oldest one in progress, is complete."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    """Complete all reductions, and agree with the other ranks on the units that were reduced."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """After a failed step, wait for a unit's operations, release it and drop its gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Trim:
    """Return unused memory to the system. If `all_buffers` is set, include reduction buffers."""

    all_buffers: bool = False


Action = Gather | Wait | Release | Collect | SetAside | Reduce | Finish | Exchange | Abandon | Trim
