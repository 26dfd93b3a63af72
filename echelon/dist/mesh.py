"""DeviceMesh: the world's ranks as a grid, with a group along each of its axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import overload

from echelon.dist.group import ProcessGroup
from echelon.dist.runtime import new_group, world


class DeviceMesh:
    """The world's ranks in row-major order: the last axis holds neighbouring ranks.

    Every rank of the world makes the same meshes in the same order; making one blocks until all
    have come.

        mesh = DeviceMesh((2, 4), ("pp", "dp"))
        mesh["dp"]                  # the ProcessGroup of my row: 4 ranks
        mesh["pp", "dp"]            # a mesh of these axes alone, for what takes several

    Args:
        shape: ranks along each axis; their product is the world's size.
        names: a name for each axis.

    Raises:
        ValueError: shape and names do not fit each other or the world.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str]) -> None:
        everyone = world()
        self.shape = tuple(int(length) for length in shape)
        self.names = tuple(names)
        _check(self.shape, self.names, everyone.size)
        self.coordinate = _coordinate(everyone.rank, self.shape)
        self._groups = {
            name: _make_axis(self.shape, axis, name) for axis, name in enumerate(self.names)
        }

    @classmethod
    def _of(cls, mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
        part = cls.__new__(cls)
        axes = [mesh.names.index(name) for name in names]
        part.shape = tuple(mesh.shape[axis] for axis in axes)
        part.names = names
        part.coordinate = tuple(mesh.coordinate[axis] for axis in axes)
        part._groups = {name: mesh._groups[name] for name in names}
        return part

    @overload
    def __getitem__(self, names: str) -> ProcessGroup: ...

    @overload
    def __getitem__(self, names: tuple[str, ...]) -> DeviceMesh: ...

    def __getitem__(self, names: str | tuple[str, ...]) -> ProcessGroup | DeviceMesh:
        """Return my group along an axis, or a mesh of several axes, in the order asked for.

        Raises:
            ValueError: no axis has that name.
        """
        wanted = (names,) if isinstance(names, str) else names
        unknown = [name for name in wanted if name not in self.names]
        if unknown:
            raise ValueError(
                f"the mesh has no axis {unknown[0]!r}; its axes: {', '.join(self.names)}"
            )
        return self._groups[names] if isinstance(names, str) else DeviceMesh._of(self, names)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.shape, strict=True))
        return f"DeviceMesh({axes}, coordinate {self.coordinate})"


def _check(shape: tuple[int, ...], names: tuple[str, ...], world_size: int) -> None:
    if not shape or len(shape) != len(names):
        raise ValueError(f"a mesh needs a name for each axis: shape {shape}, names {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"mesh names {names}: one comes twice")
    if min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"mesh shape {shape} has {math.prod(shape)} places, the world has {world_size} ranks"
        )


def _coordinate(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for length in reversed(shape):
        rank, index = divmod(rank, length)
        place.append(index)
    return tuple(reversed(place))


def _make_axis(shape: tuple[int, ...], axis: int, name: str) -> ProcessGroup:
    """Make every line of ranks along `axis`; return the one that I am on."""
    mine: ProcessGroup | None = None
    others = [range(length) for index, length in enumerate(shape) if index != axis]
    for fixed in itertools.product(*others):
        line = [_rank((*fixed[:axis], place, *fixed[axis:]), shape) for place in range(shape[axis])]
        mine = new_group(line, name=name) or mine
    assert mine is not None, (shape, axis)
    return mine


def _rank(coordinate: tuple[int, ...], shape: tuple[int, ...]) -> int:
    rank = 0
    for index, length in zip(coordinate, shape, strict=True):
        rank = rank * length + index
    return rank
