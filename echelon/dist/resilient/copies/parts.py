"""Describe the parts of a model's tensors that a rank holds, whether shards or full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.states import shards


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A contiguous range of elements of one model tensor, in row-major order.

    Attributes:
        name: the tensor's name in the model.
        shape: the shape of the full tensor.
        start: the index of this rank's first element in the flattened tensor.
        length: the number of elements on this rank, which can be 0.
        data: the elements, in memory that belongs to the model.
        tensor: the tensor registered with the optimizer. Sharded values in the optimizer's state
            have the same shape as this tensor.
        stage: the index of the stage that holds the tensor, if the model is a pipeline.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    data: torch.Tensor
    tensor: torch.Tensor
    stage: int = 0

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, stage: int) -> Part:
        """Return a part that covers a full tensor."""
        return cls(name, tuple(tensor.shape), 0, tensor.numel(), tensor.detach(), tensor, stage)

    def divides(self, value: Any) -> bool:
        """Return whether a value in the optimizer's state is sharded in the same way as this part.

        Such a value is a tensor of the same shape as `tensor`, with at least one dimension.
        """
        return (
            isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.tensor.shape
        )


def sharded_parts(module: nn.Module, prefix: str = "", stage: int = 0) -> dict[str, Part]:
    """Return this rank's shards of a module, keyed by `prefix` followed by the parameter's name."""
    found = [
        Part(prefix + name, one.shape, one.start, one.length, one.data, one.parameter, stage)
        for name, one in shards(module).items()
    ]
    return {one.name: one for one in found}


def exposed_storages(modules: Iterable[nn.Module], parts: Mapping[str, Part]) -> set[int]:
    """Return the data pointers of the storages that a forward or backward pass can write to."""
    found: list[torch.Tensor] = []
    for module in modules:
        found += [*module.parameters(), *module.buffers()]
    for part in parts.values():
        found += [part.data, part.tensor]
    found += [one.grad for one in found if one.grad is not None]
    return {one.untyped_storage().data_ptr() for one in found}
