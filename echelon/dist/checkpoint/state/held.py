"""Describe which elements of a tensor this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import dtype_bytes
from echelon.dist.checkpoint.disk.pattern import Pattern, Repeats


@dataclass(frozen=True, slots=True)
class Held:
    """A range of a tensor's elements in row-major order, beginning at `start`.

    Attributes:
        path: the tensor's name in the checkpoint.
        shape: the shape of the full tensor.
        data: a tensor of any shape that holds the elements in row-major order.
        start: the index of the first element.
        sharded: whether other ranks hold other elements of the tensor.
        repeats: how ranges of elements repeat; see `Pattern`.
    """

    path: str
    shape: tuple[int, ...]
    data: Tensor
    start: int = 0
    sharded: bool = False
    repeats: Repeats = ()

    @property
    def dtype(self) -> str:
        """The name of the dtype, without "torch."."""
        return dtype_name(self.data.dtype)

    @property
    def length(self) -> int:
        """The number of elements held."""
        return self.data.numel()

    @property
    def pattern(self) -> Pattern:
        """The pattern that describes which elements this rank holds."""
        num_runs = math.prod(count for count, _ in self.repeats)
        return Pattern(self.start, self.length // num_runs, self.repeats)

    def part(self, start: int, length: int) -> Held:
        """Return a `Held` with 1-D data for a range of this object's elements.

        `start` is counted from this object's first element.
        """
        flat = self.data.reshape(-1)
        return Held(self.path, self.shape, flat[start : start + length], self.start + start, True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


def share(held: Sequence[Held], index: int, count: int) -> Iterator[Held]:
    """Split the writing of replicas across the ranks that hold them; yield the caller's part.

    There are `count` replicas, and the caller holds replica `index`. All parts have about the same
    number of bytes. A tensor can be split across parts, unless it has several ranges.
    """
    total = sum(one.length * dtype_bytes(one.dtype) for one in held)
    first_byte, last_byte = total * index // count, total * (index + 1) // count
    position = 0
    for one in held:
        size = dtype_bytes(one.dtype)
        first = _elements_before(first_byte - position, size, one.length)
        last = _elements_before(last_byte - position, size, one.length)
        if one.repeats:  # left whole: the copy that its first byte belongs to writes it
            if first_byte <= position < last_byte:
                yield one
        elif last > first:
            yield one if last - first == one.length else one.part(first, last - first)
        elif index == 0 and not math.prod(one.shape):
            yield one  # an empty tensor has no bytes, but a shape
        position += one.length * size


def _elements_before(num_bytes: int, size: int, length: int) -> int:
    """Return how many of `length` elements of `size` bytes begin before byte `num_bytes`."""
    return min(length, max(0, -(-num_bytes // size)))
