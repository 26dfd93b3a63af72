"""Determine which elements of a full tensor this rank holds.

A tensor can be a plain tensor, a shard made by echelon's `fully_shard`, a tensor-parallel slice
(which can itself be sharded), or a DTensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.pattern import Repeats, pattern_of
from echelon.dist.dtensor import is_dtensor
from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.slices import Slice, slice_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Local(NamedTuple):
    """A piece of a tensor that this rank holds.

    Attributes:
        data: the elements of the piece.
        shape: the shape of the full tensor.
        start: the index of the piece's first element, in row-major order.
        sharded: whether other ranks hold other elements of the tensor.
        repeats: how ranges of elements repeat; see `Pattern`.
    """

    data: Tensor
    shape: tuple[int, ...]
    start: int
    sharded: bool
    repeats: Repeats = ()


def pieces(tensor: Tensor) -> list[Local]:
    """Return the pieces of a tensor that this rank holds, in ascending order.

    A sharded tensor-parallel slice can have several pieces. Any other tensor has one piece.

    Raises:
        ValueError: a DTensor holds partial sums, or its indices are not evenly spaced.
    """
    part, member = slice_of(tensor), member_of(tensor)
    if part is None:
        return [_local(tensor)]
    return _pieces_of_slice(elements(tensor), 0 if member is None else member.part.start, part)


def pieces_like(parameter: Tensor, data: Tensor) -> list[Local]:
    """Split a tensor of a parameter's shape into the same pieces as the parameter.

    Args:
        parameter: the parameter that determines the positions of the elements.
        data: this rank's tensor of the same shape, such as the parameter's optimizer state.

    Raises:
        ValueError: a DTensor holds partial sums, or the indices of this rank's elements in it are
            not evenly spaced.
    """
    parts, own, first = pieces(parameter), elements(data), 0
    if len(parts) == 1:
        return [parts[0]._replace(data=own)]
    found = []
    for one in parts:
        length = one.data.numel()
        found.append(one._replace(data=own.reshape(-1)[first : first + length]))
        first += length
    return found


def elements(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a tensor."""
    member = member_of(tensor)
    if member is not None:
        return member.shard.detach()
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def is_divided(tensor: Tensor) -> bool:
    """Return whether other ranks hold other elements of a tensor.

    Raises:
        ValueError: a DTensor holds partial sums, or its indices are not evenly spaced.
    """
    return slice_of(tensor) is not None or _local(tensor).sharded


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the full tensor.

    Raises:
        ValueError: a DTensor holds partial sums, or its indices are not evenly spaced.
    """
    part = slice_of(tensor)
    return _local(tensor).shape if part is None else part.shape


def _local(tensor: Tensor) -> Local:
    member = member_of(tensor)
    if member is not None:
        shape = tuple(member.piece.shape)
        return Local(member.shard.detach(), shape, member.part.start, sharded=True)
    if is_dtensor(tensor):
        return _local_of_dtensor(tensor)
    return Local(tensor.detach(), tuple(tensor.shape), 0, sharded=False)


def _pieces_of_slice(data: Tensor, start: int, part: Slice) -> list[Local]:
    """Split a range of a slice's elements into pieces, each with its position in the full tensor.

    Args:
        data: the elements of the range.
        start: the index of the range's first element within the slice.
        part: the description of the slice.
    """
    width = math.prod(part.local_shape[part.dim :])
    whole_width = math.prod(part.shape[part.dim :])
    length = data.numel()
    if not length or not width:
        return [Local(data, part.shape, 0, sharded=True)]

    def place(first: int, count: int, repeats: Repeats = ()) -> Local:
        row, column = divmod(start + first, width)
        where = row * whole_width + part.index * width + column
        own = data if count == length else data.reshape(-1)[first : first + count]
        return Local(own, part.shape, where, True, repeats)

    head = min(length, -start % width)
    num_rows = (length - head) // width
    tail = length - head - num_rows * width
    found = [place(0, head)] if head else []
    if num_rows:
        repeats = ((num_rows, whole_width),) if num_rows > 1 else ()
        if width == whole_width:
            repeats = ()
        found.append(place(head, num_rows * width, repeats))
    if tail:
        found.append(place(length - tail, tail))
    return found


def owner(tensor: Tensor) -> Tensor:
    """Return the tensor that the optimizer updates: the shard if the parameter is sharded."""
    member = member_of(tensor)
    return tensor if member is None else member.shard


def wrap(data: Tensor, like: Tensor) -> Tensor:
    """Return local elements as a DTensor with the placements of `like`.

    If `like` is not a DTensor, the elements are returned unchanged.
    """
    if not is_dtensor(like):
        return data
    return type(like).from_local(
        data.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _local_of_dtensor(tensor: DTensor) -> Local:
    placements, shape = tensor.placements, tuple(tensor.shape)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a DTensor placed as {placements} holds partial sums: redistribute it first"
        )
    data = tensor.to_local().detach()
    if tuple(data.shape) == shape:
        return Local(data, shape, 0, sharded=False)
    pattern = pattern_of(shape, [_indices(tensor, dim) for dim in range(len(shape))])
    assert pattern.numel == data.numel(), (pattern, data.shape, placements)
    return Local(data, shape, pattern.start, True, pattern.repeats)


def _indices(tensor: DTensor, dim: int) -> npt.NDArray[np.int64]:
    """Return this rank's indices along a dim, using torch's own rules for splitting."""
    mesh, found = tensor.device_mesh, torch.arange(tensor.shape[dim])
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return np.empty(0, np.int64)
    for axis, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        kind: Any = type(placement)
        along = kind(0, **_further(placement))
        parts, _ = along._split_tensor(found, mesh.size(axis), with_padding=False, contiguous=True)
        found = parts[coordinate[axis]]
    indices: npt.NDArray[np.int64] = found.numpy()
    return indices


def _further(placement: Any) -> dict[str, int]:
    """Return a placement's attributes other than its dim."""
    factor = getattr(placement, "split_factor", None)
    return {} if factor is None else {"split_factor": factor}
