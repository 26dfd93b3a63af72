"""Determine how many replicas of a sharded model a new world has."""

from __future__ import annotations

from collections.abc import Callable

from echelon.dist.group import ProcessGroup


class Replicas:
    """The number of replicas of a sharded model, as a function of the number of ranks.

    Args:
        initial: the number of replicas at the start.
        number_for: the program's function, which returns the number of replicas for a given number
            of ranks. None means the highest number up to `initial` that divides the number of
            ranks.

    Attributes:
        initial: the number of replicas at the start.

    Example:
        >>> replicas = Replicas(4)
        >>> [replicas.number(size) for size in (8, 7, 6)]
        [4, 1, 3]
    """

    def __init__(self, initial: int, number_for: Callable[[int], int] | None = None) -> None:
        self.initial = initial
        self._number_for = number_for

    def check(self, size: int) -> None:
        """Check the number of replicas for every number of ranks that can remain after losses.

        Args:
            size: the number of ranks at the start.

        Raises:
            ValueError: the program's function does not return the model's current number of
                replicas for `size` ranks, or its result for a smaller number of ranks does not
                divide that number of ranks.
        """
        found = [self.number(left) for left in range(1, size + 1)][-1]
        if found != self.initial:
            raise ValueError(
                f"num_replicas({size}) returned {found}, but the model was sharded with "
                f"{self.initial} replicas"
            )

    def number(self, size: int) -> int:
        """Return the number of replicas for a world of `size` ranks.

        Raises:
            ValueError: the program's function returned a value that does not divide `size`.
        """
        if self._number_for is None:
            fitting = (one for one in range(min(self.initial, size), 0, -1) if size % one == 0)
            return next(fitting)
        found = self._number_for(size)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1 or size % found:
            raise ValueError(
                f"num_replicas({size}) must return a divisor of {size}, but returned {found!r}"
            )
        return found

    def agreed_number(self, group: ProcessGroup) -> int:
        """Return the number of replicas for a world; check that all ranks agree. Collective.

        Raises:
            ValueError: the program's function returned an invalid number, or different numbers on
                different ranks.
            CollectiveError: a rank was lost.
        """
        found = self.number(group.size)
        if self._number_for is None:
            return found
        every = group.all_gather_object(found)
        if any(one != found for one in every):
            raise ValueError(f"num_replicas({group.size}) differs between ranks: {every}")
        return found
