"""Define the set of ranks that train together until a rank is lost or joins."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.dist.group import ProcessGroup


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together until a rank is lost or joins.

    Attributes:
        group: the group of these ranks; `echelon.dist.world()` returns the same group.
        epoch: the epoch's number, which is 0 at the start and increases with each loss and join.
        lost: the ranks that were lost and have not been replaced, as numbered by the launcher.

    Example:
        >>> def prepare(world):
        ...     print(f"epoch {world.epoch}, size {world.group.size}, lost: {list(world.lost)}")
        ...     return lambda step: None
        >>> run(prepare, model, optimizer, total=1)
        epoch 0, size 1, lost: []
    """

    group: ProcessGroup
    epoch: int
    lost: tuple[int, ...]
