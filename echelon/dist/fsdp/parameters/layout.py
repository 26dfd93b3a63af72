"""Where each parameter of a unit lies in the unit's flat vector, and which part of it is whose.

    flat vector   |p0   .|p1          .|p2 .|p3             .|  padding |
    chunks        |   rank 0     |   rank 1     |   rank 2     | ...

Every parameter starts on a boundary that vector instructions like. The chunks of all but small
units are whole numbers of pages, so that what belongs to others can be returned to the system
page by page; of a small unit that would leave most ranks with nothing. Pure arithmetic: no tensors.
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
    """One parameter's place in the flat vector, in elements."""

    start: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has of one parameter, in elements; `length` may be 0.

    Attributes:
        start: first element, counted in the flattened parameter.
        length: number of elements.
        offset: where they begin in the rank's chunk.
    """

    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat vector of `group_size * chunk_numel` elements and the parameters in it."""

    pieces: tuple[Piece, ...]
    chunk_numel: int
    group_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole vector, padding included."""
        return self.chunk_numel * self.group_size

    def part(self, index: int, rank: int) -> Part:
        """Return what `rank` has of a parameter."""
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
    """Place parameters one behind the other and divide the whole among the ranks.

    Args:
        shapes: of each parameter.
        itemsize: bytes of the smallest element that the vector will hold (a unit may be gathered in
            another dtype than it is kept in; both are to fall on pages).
        group_size: number of ranks.
        page_bytes: a chunk is a multiple of this, unless the unit is small.
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
    """Return a shape of `numel` elements that is different for each tag of `TAG_BITS` bits.

    Groups compare the shapes of every collective before any result is written. Units of equal size
    would look alike; with a shape that says which unit it is, a rank that gathers another one than
    the others is an error with its name, at no cost.
    """
    bits = [1 + (tag >> bit & 1) for bit in range(TAG_BITS)]
    rest, odd = divmod(numel, math.prod(bits))
    assert not odd, (numel, tag)
    return (*bits, rest)


def tag_of(shape: Sequence[int]) -> int:
    """Return the tag that `tagged_shape` put into a shape; -1 if there is none."""
    bits = shape[:TAG_BITS]
    if len(shape) != TAG_BITS + 1 or any(bit not in (1, 2) for bit in bits):
        return -1
    return sum((bit - 1) << index for index, bit in enumerate(bits))
