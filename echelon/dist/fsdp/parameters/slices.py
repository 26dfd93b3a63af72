"""Slices: parameters that tensor parallelism has divided along one dim.

A parameter of a rank is then an even part of the whole one. What depends on whole shapes and places
(checkpoints, whole state dicts) reads the part's place here. The mark is an attribute of the
parameter, as `marks.py` has it, and passes from a parameter to its leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NAME = "_echelon_slice"


@dataclass(frozen=True, slots=True)
class Slice:
    """An even part of a tensor.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is divided.
        index: of this part.
        count: how many parts there are.
    """

    shape: tuple[int, ...]
    dim: int
    index: int
    count: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The part's shape."""
        shape = list(self.shape)
        shape[self.dim] //= self.count
        return tuple(shape)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """View the part in the whole tensor."""
        length = self.shape[self.dim] // self.count
        return whole.narrow(self.dim, self.index * length, length)

    def __deepcopy__(self, memo: object) -> Slice:
        """Return the same object, which never changes."""
        return self


def set_slice(parameter: nn.Parameter, part: Slice) -> None:
    """Note that a parameter is a part of a whole one."""
    parameter.__dict__[_NAME] = part


def slice_of(tensor: Any) -> Slice | None:
    """Return of what a parameter is a part; None: it is whole."""
    found = getattr(tensor, _NAME, None)
    return found if isinstance(found, Slice) else None
