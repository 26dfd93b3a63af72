"""Define the actions that `Order` returns and the driver carries out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from echelon.dist.fsdp.order.entry import Entry


@dataclass(frozen=True, slots=True)
class Gather:
    """An action that starts gathering a unit; if `near` is set, only from neighboring ranks."""

    entry: Entry
    near: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """An action that blocks until a unit is gathered, and makes the modules use its parameters."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Release:
    """An action that releases a unit's parameters.

    If `keep_near` is set, the range that this rank keeps for neighboring ranks is not released.
    """

    entry: Entry
    keep_near: bool


@dataclass(frozen=True, slots=True)
class Collect:
    """An action that adds a gradient to its unit's reduction."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class SetAside:
    """An action that stores a gradient on this rank without reducing it."""

    entry: Entry
    member: Hashable


@dataclass(frozen=True, slots=True)
class Reduce:
    """An action that starts reducing a unit's gradients."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Finish:
    """An action that blocks until a unit's reduction is complete.

    This reduction is always the oldest reduction in progress.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    """An action that completes all reductions at the end of a backward pass.

    As part of this action, the ranks check that they ran the units in the same order, and agree on
    which parameters have gradients.
    """


@dataclass(frozen=True, slots=True)
class Abandon:
    """An action that cleans up a unit after a failed step.

    The driver waits for gathers of the unit, releases the unit and drops its gradients.
    """

    entry: Entry


@dataclass(frozen=True, slots=True)
class Trim:
    """An action that releases idle memory and, if `all_buffers` is set, reduction buffers."""

    all_buffers: bool = False


Action = Gather | Wait | Release | Collect | SetAside | Reduce | Finish | Exchange | Abandon | Trim
