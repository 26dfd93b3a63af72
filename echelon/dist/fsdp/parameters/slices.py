"""Mark a parameter as a slice if tensor parallelism has split it along one dim.

A slice is one of several equal parts of a full parameter. Code that needs full shapes, such as
checkpoints, reads the position of a slice from its mark. The mark is an attribute of the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NAME = "_echelon_slice"


@dataclass(frozen=True, slots=True)
class Slice:
    """One of several equal parts of a tensor.

    Attributes:
        shape: the shape of the full tensor.
        dim: the dim along which the tensor is split.
        index: the index of this slice.
        count: the number of slices.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    count: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this slice."""
        shape = list(self.shape)
        shape[self.dim] //= self.count
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this slice of a full tensor, as a view."""
        length = self.shape[self.dim] // self.count
        return whole.narrow(self.dim, self.index * length, length)

    def __deepcopy__(self, memo: object) -> Slice:
        """Return this slice itself instead of a copy, because slices are immutable."""
        return self


def set_slice(parameter: nn.Parameter, part: Slice) -> None:
    """Mark a parameter as one slice of a full parameter."""
    parameter.__dict__[_NAME] = part


def slice_of(tensor: Any) -> Slice | None:
    """Return the slice that a parameter represents, or None if the parameter is whole."""
    found = getattr(tensor, _NAME, None)
    return found if isinstance(found, Slice) else None
