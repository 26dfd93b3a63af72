"""Limit the memory that sharding uses beyond that of the unit being computed.

A third of the budget is reserved for each of three uses: units gathered ahead, gradients being
reduced, and idle memory for the next gather. Decisions depend only on the sizes and the order of
the units, so all ranks make the same decisions. Regardless of the budget, one unit can always be
gathered ahead, and one reduction can be in progress when the next reduction begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Sized(Protocol):
    """The properties of a unit that determine the default budget; see `Entry`."""

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the unit's gathered parameters."""

    @property
    def gradient_bytes(self) -> int:
        """The size in bytes of the buffer used to reduce the gradients."""

    @property
    def depth(self) -> int:
        """The number of units gathered ahead while this unit computes."""

    @property
    def outer(self) -> bool:
        """True if the unit contains other units."""


@dataclass(frozen=True, slots=True)
class Size:
    """A copy of a unit's `Sized` properties that outlives the unit."""

    num_bytes: int
    gradient_bytes: int
    depth: int
    outer: bool


class Budget:
    """The memory budget, in bytes, that all units of a group share on one rank.

    Args:
        num_bytes: the budget. None means six times the size of the largest unit that contains no
            other unit, or a larger multiple if more than two units are gathered ahead.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.num_bytes = num_bytes
        self._default_third = 0

    def measure(self, units: Iterable[Sized]) -> None:
        """Compute the default budget from the units' sizes."""
        every = list(units)
        inner = [unit for unit in every if not unit.outer] or every
        largest = max((max(one.num_bytes, one.gradient_bytes) for one in inner), default=0)
        depth = max((one.depth for one in inner), default=0)
        self._default_third = max(2, depth) * largest

    @property
    def third(self) -> int:
        """The number of bytes in each third of the budget."""
        return self._default_third if self.num_bytes is None else self.num_bytes // 3

    def allows_ahead(self, ahead_bytes: int, more_bytes: int) -> bool:
        """Return whether another unit can be gathered ahead.

        Args:
            ahead_bytes: the size in bytes of the units that are already gathered ahead.
            more_bytes: the size in bytes of the other unit.
        """
        return not ahead_bytes or ahead_bytes + more_bytes <= self.third

    def allows_reduction(self, under_way: Sequence[int], more_bytes: int) -> bool:
        """Return whether a reduction of `more_bytes` can begin while others are in progress.

        Args:
            under_way: the sizes in bytes of the reductions in progress.
            more_bytes: the size in bytes of the new reduction.
        """
        return len(under_way) <= 1 or sum(under_way) + more_bytes <= self.third
