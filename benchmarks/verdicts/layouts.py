"""Assign a job's ranks to process groups.

Groups are created in the same order on all ranks, as `new_group` requires. Their names are running
numbers over all groups of the job or, as in newer device meshes, hashes of their members. A group
exists only on its members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.verdicts.engine import Group

RANKS_PER_HOST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A mesh of ranks; the last axis varies fastest.

    Attributes:
        axes: (name, size) of each axis, the slowest-varying first.
        groups: axis name -> its groups; "world" -> the default group.
        places: axis name -> rank -> the index of its group.
    """

    world_size: int
    axes: tuple[tuple[str, int], ...]
    groups: dict[str, tuple[Group, ...]]
    places: dict[str, dict[int, int]]

    def group(self, axis: str, rank: int) -> Group:
        """Return a rank's group along an axis."""
        return self.groups[axis][self.places[axis][rank]]

    def coordinate(self, axis: str, rank: int) -> int:
        """Return a rank's coordinate along an axis."""
        return self.group(axis, rank).ranks.index(rank)

    def own(self, rank: int) -> list[Group]:
        """Return all groups of a rank, in creation order."""
        return list(dict.fromkeys(self.group(axis, rank) for axis in self.groups))


def mesh(
    axes: Sequence[tuple[str, int]], *, hashed: bool = False, described: bool = True
) -> Layout:
    """Arrange ranks in a mesh, with one group per line along each axis."""
    world_size = 1
    for _, size in axes:
        world_size *= size
    groups: dict[str, tuple[Group, ...]] = {
        "world": (Group("0", "default_pg", tuple(range(world_size))),)
    }
    number = 1
    for position, (name, size) in enumerate(axes):
        if len(axes) == 1:
            groups[name] = groups["world"]
            continue
        step = 1
        for _, below in axes[position + 1 :]:
            step *= below
        found: list[Group] = []
        for outer, inner in product(range(world_size // (size * step)), range(step)):
            base = outer * size * step + inner
            ranks = tuple(base + k * step for k in range(size))
            found.append(Group(_name(number, ranks, hashed), _desc(name, described), ranks))
            number += 1
        groups[name] = tuple(found)
    places = {
        name: {rank: place for place, group in enumerate(found) for rank in group.ranks}
        for name, found in groups.items()
    }
    return Layout(world_size=world_size, axes=tuple(axes), groups=groups, places=places)


def _name(number: int, ranks: tuple[int, ...], hashed: bool) -> str:
    if not hashed:
        return str(number)
    return hashlib.sha1(f"{ranks}/{number}".encode()).hexdigest()


def _desc(axis: str, described: bool) -> str:
    return f"mesh_{axis}" if described else "undefined"
