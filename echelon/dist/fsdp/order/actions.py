"""Define the actions that the order requests from the driver, which carries them out in turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from echelon.dist.fsdp.order.entry import Entry


@dataclass(frozen=True, slots=True)
class Gather:
    """Start gathering a unit's parameters; with `near`, only among the ranks that kept a part."""

    entry: Entry
    near: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until a unit's parameters are in memory, and make the unit's modules use them."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Release:
    """Release a unit's parameters; with `keep_near`, keep the part that the near ranks need."""

    entry: Entry
    keep_near: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Add a gradient to its unit's reduction."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep a gradient on this rank, because its unit does not reduce gradients at present."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start reducing a unit's gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Finish:
    """Block until the oldest reduction in progress, which belongs to this unit, is complete."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    """Complete all reductions, and agree with the other ranks on which units were reduced."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Wait for a unit's operations from a failed step, release the unit and drop its gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Trim:
    """Return unused memory to the system; with `all_buffers`, also the reductions' buffers."""

    all_buffers: bool = False


Action = Gather | Wait | Release | Collect | SetAside | Reduce | Finish | Exchange | Abandon | Trim
