"""Which elements of a whole tensor a tensor on this rank stands for.

Three kinds: plain tensors, which every rank holds whole; shards of echelon's `fully_shard`; and
torch's DTensors, sharded along any dims.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.pattern import Repeats, pattern_of
from echelon.dist.fsdp.parameters.flat import member_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Local(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        data: the elements held.
        shape: of the whole tensor.
        start: the first element held, in row-major order.
        sharded: other ranks hold the rest.
        repeats: of runs that do not follow each other; see `Pattern`.
    """

    data: Tensor
    shape: tuple[int, ...]
    start: int
    sharded: bool
    repeats: Repeats = ()


def local(tensor: Tensor) -> Local:
    """Return what this rank holds of a tensor.

    Raises:
        ValueError: a DTensor of partial sums, or of indices at no regular distance.
    """
    member = member_of(tensor)
    if member is not None:
        shape = tuple(member.piece.shape)
        return Local(member.shard.detach(), shape, member.part.start, sharded=True)
    if _is_dtensor(tensor):
        return _local_of_dtensor(tensor)
    return Local(tensor.detach(), tuple(tensor.shape), 0, sharded=False)


def owner(tensor: Tensor) -> Tensor:
    """Return the tensor that an optimizer knows: the shard of a parameter that is gathered now."""
    member = member_of(tensor)
    return tensor if member is None else member.shard


def wrap(data: Tensor, like: Tensor) -> Tensor:
    """Return new local elements as what an optimizer keeps beside the parameter `like`."""
    if not _is_dtensor(like):
        return data
    return type(like).from_local(
        data.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")  # slow to load, and then there are none
    return module is not None and isinstance(tensor, module.DTensor)


def _local_of_dtensor(tensor: DTensor) -> Local:
    placements, shape = tensor.placements, tuple(tensor.shape)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"a DTensor placed as {placements} holds partial sums: redistribute it before"
        )
    data = tensor.to_local().detach()
    if tuple(data.shape) == shape:
        return Local(data, shape, 0, sharded=False)
    pattern = pattern_of(shape, [_indices(tensor, dim) for dim in range(len(shape))])
    assert pattern.numel == data.numel(), (pattern, data.shape, placements)
    return Local(data, shape, pattern.start, True, pattern.repeats)


def _indices(tensor: DTensor, dim: int) -> npt.NDArray[np.int64]:
    """Return which indices of a dim are here: torch's own way to split, on the indices alone."""
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
    """Return what a strided shard has besides its dim."""
    factor = getattr(placement, "split_factor", None)
    return {} if factor is None else {"split_factor": factor}
