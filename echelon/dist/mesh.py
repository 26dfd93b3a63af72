"""Arrange the world's ranks as a grid, with a group along each axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from echelon.dist.group import ProcessGroup
from echelon.dist.runtime import new_group, world


class DeviceMesh:
    """A grid of the world's ranks in row-major order.

    Every rank of the world must create the same meshes in the same order. The constructor blocks
    until all ranks have joined. Creating a sub-mesh is a local operation.

        mesh = DeviceMesh((2, 4), ("pp", "dp"))
        mesh["dp"]                  # a sub-mesh: the axis "dp" alone, shape (4,)
        mesh["pp", "dp"]            # a sub-mesh of two axes, in this order
        mesh.group("dp")            # the ProcessGroup along "dp": this rank's row of 4 ranks

    Args:
        shape: the number of ranks along each axis; the product is the world's size.
        names: one name per axis.

    Attributes:
        shape: the number of ranks along each axis.
        names: the axes' names.
        coordinate: this rank's index along each axis.

    Raises:
        ValueError: `shape` and `names` differ in length, or `shape` does not match the world's
            size.
        CollectiveTimeoutError: a rank did not join within the world's timeout.

    Example:
        >>> mesh = DeviceMesh((1, 2), ("pp", "dp"))  # on each of 2 ranks
        >>> mesh["dp"].shape, mesh.group("dp").size
        ((2,), 2)
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

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.shape)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of one or more axes, in the requested order. Not collective.

        Raises:
            ValueError: an axis is unknown or listed twice, or `names` is empty.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if not wanted:
            raise ValueError(f"a sub-mesh needs at least one axis; the axes are {self._axes()}")
        _check_distinct(wanted)
        axes = [self._axis(name) for name in wanted]
        part = DeviceMesh.__new__(DeviceMesh)
        part.shape = tuple(self.shape[axis] for axis in axes)
        part.names = wanted
        part.coordinate = tuple(self.coordinate[axis] for axis in axes)
        part._groups = {name: self._groups[name] for name in wanted}
        return part

    def group(self, name: str | None = None) -> ProcessGroup:
        """Return this rank's group along an axis. Not collective.

        Args:
            name: the name of the axis; None means the only axis of a one-axis mesh.

        Raises:
            ValueError: no axis has that name, or `name` is None and the mesh has several axes.
        """
        if name is None:
            if len(self.names) != 1:
                raise ValueError(
                    f"{self!r} has several groups; name one of the axes {self._axes()}"
                )
            name = self.names[0]
        return self._groups[self.names[self._axis(name)]]

    get_group = group

    def completed(self, names: Sequence[str]) -> DeviceMesh:
        """Return a mesh with the given axes, in which every additional axis has size 1.

        If an axis is added, the call is collective for the whole world.

        Args:
            names: the axes of the new mesh, in order, including all axes of this mesh.

        Raises:
            ValueError: an axis of this mesh is not among the names, or a name is listed twice.
            CollectiveTimeoutError: a rank did not join within the world's timeout.
        """
        _check_distinct(tuple(names))
        left_out = [name for name in self.names if name not in names]
        if left_out:
            raise ValueError(
                f"axis {left_out[0]!r} of {self!r} is missing from the names {tuple(names)}"
            )
        groups = dict(self._groups)
        lacking = [name for name in names if name not in self.names]
        if lacking:
            alone = _make_alone(world().size)
            groups.update(dict.fromkeys(lacking, alone))
        places = dict(zip(self.names, zip(self.shape, self.coordinate, strict=True), strict=True))
        whole = DeviceMesh.__new__(DeviceMesh)
        whole.names = tuple(names)
        whole.shape = tuple(places.get(name, (1, 0))[0] for name in names)
        whole.coordinate = tuple(places.get(name, (1, 0))[1] for name in names)
        whole._groups = {name: groups[name] for name in names}
        return whole

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.shape, strict=True))
        return f"DeviceMesh({axes}, coordinate {self.coordinate})"

    def _axis(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {self._axes()}")
        return self.names.index(name)

    def _axes(self) -> str:
        return ", ".join(self.names)


def _check(shape: tuple[int, ...], names: tuple[str, ...], world_size: int) -> None:
    if not shape or len(shape) != len(names):
        raise ValueError(
            "a mesh needs at least one axis, and one name per axis; "
            f"got shape {shape} and names {names}"
        )
    _check_distinct(names)
    if min(shape) < 1 or math.prod(shape) != world_size:
        raise ValueError(
            f"mesh shape {shape} needs {math.prod(shape)} ranks, but the world has {world_size}"
        )


def _check_distinct(names: tuple[str, ...]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"mesh axis {twice[0]!r} is listed twice: {names}")


def _coordinate(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for length in reversed(shape):
        rank, index = divmod(rank, length)
        place.append(index)
    return tuple(reversed(place))


def _make_axis(shape: tuple[int, ...], axis: int, name: str) -> ProcessGroup:
    """Create a group for each line of ranks along `axis`; return this rank's group."""
    own: ProcessGroup | None = None
    others = [range(length) for index, length in enumerate(shape) if index != axis]
    for fixed in itertools.product(*others):
        line = [_rank((*fixed[:axis], place, *fixed[axis:]), shape) for place in range(shape[axis])]
        own = new_group(line, name=name) or own
    assert own is not None, (shape, axis)
    return own


def _make_alone(world_size: int) -> ProcessGroup:
    """Create a group with a single member for every rank; return this rank's group."""
    own: ProcessGroup | None = None
    for rank in range(world_size):
        own = new_group([rank], name="alone") or own
    assert own is not None, world_size
    return own


def _rank(coordinate: tuple[int, ...], shape: tuple[int, ...]) -> int:
    rank = 0
    for index, length in zip(coordinate, shape, strict=True):
        rank = rank * length + index
    return rank
