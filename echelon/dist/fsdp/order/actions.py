"""What the order asks of its driver. Actions are carried out one after the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from echelon.dist.fsdp.order.entry import Entry


@dataclass(frozen=True, slots=True)
class Gather:
    """Begin to gather a unit's parameters; `near`: among the ranks that kept a part of them."""

    entry: Entry
    near: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until a unit's parameters are in memory, and let its modules see them."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Release:
    """Release a unit's parameters; `keep_near`: except for the part that near ranks need."""

    entry: Entry
    keep_near: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """Take a gradient into the unit's reduction."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep a gradient on this rank: its unit does not reduce now."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class Reduce:
    """Begin to reduce a unit's gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Finish:
    """Block until a unit's reduction, the oldest under way, is complete."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    """Complete all reductions and agree with the other ranks on what was reduced."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Wait for what a failed step left under way in a unit, release it, drop its gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Trim:
    """Return memory that no unit uses to the system; `all_buffers`: those of reductions too."""

    all_buffers: bool = False


Action = Gather | Wait | Release | Collect | SetAside | Reduce | Finish | Exchange | Abandon | Trim
