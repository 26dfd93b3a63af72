"""Which elements of a whole tensor a tensor on this rank stands for.

Three kinds: plain tensors, which every rank holds whole; shards of our `fully_shard`; and torch's
DTensors, if what they hold follows each other in the whole tensor (FSDP2 shards along dim 0).
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from echelon.dist.fsdp.flat import member_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Local(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        data: the elements held.
        shape: of the whole tensor.
        start: the first element held, in row-major order.
        sharded: other ranks hold the rest.
    """

    data: Tensor
    shape: tuple[int, ...]
    start: int
    sharded: bool


def local(tensor: Tensor) -> Local:
    """Say what of a tensor this rank holds.

    Raises:
        ValueError: elements that do not follow each other.
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
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    data, shape = tensor.to_local().detach(), tuple(tensor.shape)
    if data.shape == tensor.shape:
        return Local(data, shape, 0, sharded=False)
    held, offset = compute_local_shape_and_global_offset(
        torch.Size(shape), tensor.device_mesh, tensor.placements
    )
    row = math.prod(shape[1:])
    if tuple(held[1:]) != shape[1:] or "Strided" in repr(tensor.placements):
        raise ValueError(
            f"a DTensor placed as {tensor.placements}: a checkpoint holds shards along dim 0"
        )
    return Local(data, shape, offset[0] * row if data.numel() else 0, sharded=True)
