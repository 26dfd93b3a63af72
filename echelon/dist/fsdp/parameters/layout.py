"""Compute each parameter's position in a flat vector, and each rank's chunk of the vector.

    flat vector   |p0   .|p1          .|p2 .|p3             .|  padding |
    chunks        |   rank 0     |   rank 1     |   rank 2     | ...

Every parameter is aligned for vector instructions. Chunks are aligned to pages, except in small
units. This module does not use tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_START_BYTES = 64
_LEAST_PAGES = 16  # a rank's, for chunks of whole pages: they are uneven by a sixteenth at most
TAG_BITS = 7  # a chunk divides by 2 this often: see `tagged_shape`


@dataclass(frozen=True, slots=True)
class Piece:
    """The position of one parameter in the flat vector, in elements."""

    start: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The range of one parameter's elements that one rank holds.

    Attributes:
        start: the index of the first element in the flattened parameter.
        length: the number of elements, which can be 0.
        offset: the index of the first element in the rank's chunk.
    """

    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of the parameters in a flat vector of `group_size * chunk_numel` elements."""

    pieces: tuple[Piece, ...]
    chunk_numel: int
    group_size: int

    @property
    def numel(self) -> int:
        """The number of elements in the full vector, including padding."""
        return self.chunk_numel * self.group_size

    def part(self, index: int, rank: int) -> Part:
        """Return `rank`'s shard of the parameter at `index`."""
        piece = self.pieces[index]
        first, last = rank * self.chunk_numel, (rank + 1) * self.chunk_numel
        start = min(max(piece.start, first), last)
        stop = max(start, min(piece.start + piece.numel, last))
        if start == stop:
            return Part(0, 0, 0)
        return Part(start - piece.start, stop - start, start - first)


def plan_layout(
    shapes: Sequence[Sequence[int]], itemsize: int, group_size: int, page_bytes: int
) -> Layout:
    """Lay out parameters consecutively in a vector, and split it into one chunk per rank.

    Args:
        shapes: the shape of each parameter.
        itemsize: the size in bytes of one element. If the shards and the gathered parameters have
            different dtypes, this is the smaller size.
        group_size: the number of ranks.
        page_bytes: the size of a memory page in bytes.
    """
    step = max(1, _START_BYTES // itemsize)
    pieces, end = [], 0
    for shape in shapes:
        numel = math.prod(shape)
        pieces.append(Piece(end, numel, tuple(shape)))
        end += -(-numel // step) * step
    grain = 1 << TAG_BITS
    pages = math.lcm(max(1, page_bytes // itemsize), grain)
    if end >= _LEAST_PAGES * pages * group_size:
        grain = pages
    chunk = max(1, -(-end // (grain * group_size))) * grain
    return Layout(tuple(pieces), chunk, group_size)


def tagged_shape(numel: int, tag: int) -> tuple[int, ...]:
    """Return a shape with `numel` elements that encodes a tag of `TAG_BITS` bits.

    Groups compare the shapes that ranks pass to a collective. A tag makes this comparison fail if a
    rank gathers a different unit, even if the units have equal sizes.
    """
    bits = [1 + (tag >> bit & 1) for bit in range(TAG_BITS)]
    rest, odd = divmod(numel, math.prod(bits))
    assert not odd, (numel, tag)
    return (*bits, rest)


def tag_of(shape: Sequence[int]) -> int:
    """Return the tag that `tagged_shape` encoded in a shape, or -1 if the shape has none."""
    bits = shape[:TAG_BITS]
    if len(shape) != TAG_BITS + 1 or any(bit not in (1, 2) for bit in bits):
        return -1
    return sum((bit - 1) << index for index, bit in enumerate(bits))
