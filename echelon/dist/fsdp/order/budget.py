"""Budget: the bytes that sharding may use beyond the unit that computes.

A third each for units that are gathered ahead, for gradients that are being reduced, and for idle
memory that the next gather will use. What each third allows is decided from the units' sizes and
their order alone, never from timing, so that all ranks decide alike. One unit ahead and one
reduction under way while the next begins are always allowed: without them nothing would overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Sized(Protocol):
    """What the default budget depends on, of one unit: see `Entry`."""

    @property
    def num_bytes(self) -> int:
        """Of the gathered parameters."""

    @property
    def gradient_bytes(self) -> int:
        """Of the buffer that reduces the gradients."""

    @property
    def depth(self) -> int:
        """How many units are gathered ahead."""

    @property
    def outer(self) -> bool:
        """Whether the unit contains others."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a unit that may be deleted on this rank and not yet on another."""

    num_bytes: int
    gradient_bytes: int
    depth: int
    outer: bool


class Budget:
    """Bytes on one rank, for all units of a group.

    Args:
        num_bytes: None: six times the largest unit, or more where a unit asks for more than two
            units ahead. Units that contain others do not count: they are never gathered ahead.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.num_bytes = num_bytes
        self._default_third = 0

    def measure(self, units: Iterable[Sized]) -> None:
        """Find the default from the units' sizes."""
        every = list(units)
        inner = [unit for unit in every if not unit.outer] or every
        largest = max((max(one.num_bytes, one.gradient_bytes) for one in inner), default=0)
        depth = max((one.depth for one in inner), default=0)
        self._default_third = max(2, depth) * largest

    @property
    def third(self) -> int:
        """Bytes for each of the three uses."""
        return self._default_third if self.num_bytes is None else self.num_bytes // 3

    def allows_ahead(self, ahead_bytes: int, more_bytes: int) -> bool:
        """Whether a unit may be gathered ahead beside `ahead_bytes` of others."""
        return not ahead_bytes or ahead_bytes + more_bytes <= self.third

    def allows_reduction(self, under_way: Sequence[int], more_bytes: int) -> bool:
        """Whether a reduction may begin beside others of these sizes."""
        return len(under_way) <= 1 or sum(under_way) + more_bytes <= self.third
