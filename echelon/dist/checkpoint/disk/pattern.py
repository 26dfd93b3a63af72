"""Describe which elements of a flattened tensor make up a shard.

A shard along dim 0 is one contiguous range of elements. A shard along another dim consists of many
ranges of equal length at regular intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Repeats = tuple[tuple[int, int], ...]  # (count, distance in elements), the outermost first
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A set of element ranges of equal length at regular intervals.

    Attributes:
        start: the index of the first element of the first range.
        length: the number of elements in each range.
        repeats: (count, distance in elements) pairs, outermost first. Each pair repeats the inner
            ranges `count` times. If `repeats` is empty, the set contains only one range.
    """

    start: int
    length: int
    repeats: Repeats = ()

    @property
    def num_runs(self) -> int:
        """The number of ranges in the pattern."""
        return math.prod(count for count, _ in self.repeats)

    @property
    def numel(self) -> int:
        """The number of elements in the pattern."""
        return self.length * self.num_runs

    @property
    def stop(self) -> int:
        """The index one past the pattern's last element."""
        return self.start + sum((count - 1) * step for count, step in self.repeats) + self.length

    def starts(self) -> Indices:
        """Return the start of each range, in ascending order: [num_runs]."""
        starts = np.array([self.start], np.int64)
        for count, step in self.repeats:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
        return starts

    def common(self, other: Pattern) -> npt.NDArray[np.int64]:
        """Return the pieces that this pattern and `other` have in common: [num_pieces, 3].

        Each row holds a piece's position in this pattern, its position in the other pattern, and
        its length.
        """
        if self == other:
            return np.array([[0, 0, self.numel]], np.int64)
        ours, theirs = self.starts(), other.starts()
        first = np.searchsorted(theirs, ours - other.length, side="right")
        last = np.searchsorted(theirs, ours + self.length, side="left")
        counts = np.maximum(last - first, 0)
        one = np.repeat(np.arange(ours.size), counts)
        offsets = np.arange(one.size) - np.repeat(np.cumsum(counts) - counts, counts)
        two = first[one] + offsets
        begin = np.maximum(ours[one], theirs[two])
        end = np.minimum(ours[one] + self.length, theirs[two] + other.length)
        place = one * self.length + begin - ours[one]
        place_there = two * other.length + begin - theirs[two]
        return np.stack([place, place_there, end - begin], axis=1)


def pattern_of(shape: Sequence[int], box: Sequence[npt.NDArray[Any]]) -> Pattern:
    """Return the pattern of the elements that `box` selects from a tensor.

    Args:
        shape: the shape of the tensor.
        box: the selected indices along each dim, in ascending order.

    Raises:
        ValueError: the indices of a dim are not evenly spaced.
    """
    if any(indices.size == 0 for indices in box):
        return Pattern(0, 0)
    start, step = 0, 1
    repeats: list[tuple[int, int]] = []  # the innermost first
    for size, indices in zip(reversed(shape), reversed(box), strict=True):
        start += int(indices[0]) * step
        repeats += [(count, distance * step) for count, distance in _rhythm(indices)]
        step *= size
    return _shortest(start, repeats)


def _rhythm(indices: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Describe evenly spaced indices along a dim by (count, distance) pairs, innermost first."""
    edges = np.flatnonzero(np.diff(indices) != 1) + 1
    runs = np.split(indices, edges)
    distances = {int(d) for d in np.diff([run[0] for run in runs])}
    if len({run.size for run in runs}) > 1 or len(distances) > 1:
        raise ValueError(f"indices are not evenly spaced: {indices.tolist()[:20]}")
    inner = (int(runs[0].size), 1)
    return [inner, (len(runs), distances.pop())] if distances else [inner]


def _shortest(start: int, repeats: list[tuple[int, int]]) -> Pattern:
    """Return the pattern that covers the same elements as `repeats` with the fewest repeats.

    `repeats` lists (count, distance) pairs, innermost first.
    """
    length = 1
    kept: list[tuple[int, int]] = []
    for count, step in repeats:
        if count == 1:
            continue
        if not kept and step == length:
            length *= count
        elif kept and step == kept[-1][0] * kept[-1][1]:
            kept[-1] = (kept[-1][0] * count, kept[-1][1])
        else:
            kept.append((count, step))
    return Pattern(start, length, tuple(reversed(kept)))
