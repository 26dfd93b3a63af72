"""Compute sums of squares over fixed blocks of elements, regardless of shard boundaries.

A parameter is split into blocks of 1024 elements, counted from its first element. The squares
within a block are added pairwise by repeated halving, in float64. The sums of a parameter's blocks
are added in the order of the canonical tree. A block that spans several shards is first assembled
from the ranks' elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 1024
_ROWS = 256  # blocks at a time: they stay in the cache


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block, [ceil(numel / 1024)], float64.

    Args:
        values: [numel], starting at a block's first element; the last block can be incomplete.
    """
    count = -(-values.numel() // BLOCK)
    sums = torch.empty(count, dtype=torch.float64, device=values.device)
    room = torch.empty(min(count, _ROWS) * BLOCK, dtype=torch.float64, device=values.device)
    for first in range(0, count, _ROWS):
        part = values[first * BLOCK : (first + _ROWS) * BLOCK]
        sums[first : first + _ROWS] = _halved(part, room)
    return sums


def _halved(values: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block, as a view of `room`, which is overwritten."""
    count = -(-values.numel() // BLOCK)
    squares = room[: count * BLOCK]
    squares[: values.numel()] = values
    squares[values.numel() :] = 0.0
    rows = squares.mul_(squares).view(count, BLOCK)
    half = BLOCK
    while half > 1:
        half //= 2
        rows[:, :half].add_(rows[:, half : 2 * half])
    return rows[:, 0]


def tree_total(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of [n] numbers, added in the canonical tree's order, as a 0-dim tensor.

    Zero represents an absent right child, so the numbers must not include -0.
    """
    while sums.numel() > 1:
        if sums.numel() % 2:
            sums = torch.cat([sums, sums.new_zeros(1)])
        sums = sums[0::2] + sums[1::2]
    return sums.sum() if sums.numel() == 0 else sums[0]


def tree_totals(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `tree_total` of each vector, [len(vectors)]. `vectors` must not be empty.

    Vectors of similar length are processed in one batch. They are padded with zeros, which do not
    change a total.
    """
    totals = vectors[0].new_empty(len(vectors))
    alike: dict[int, list[int]] = {}
    for index, vector in enumerate(vectors):
        alike.setdefault((vector.numel() - 1).bit_length(), []).append(index)
    for height, indices in alike.items():
        rows = totals.new_zeros(len(indices), 1 << height)
        for row, index in zip(rows, indices, strict=True):
            row[: vectors[index].numel()] = vectors[index]
        while rows.shape[1] > 1:
            rows = rows[:, 0::2] + rows[:, 1::2]
        totals[indices] = rows[:, 0]
    return totals


class PartialBlocks:
    """Block sums of one parameter that is sharded across ranks.

    Each rank writes one vector, called its message. The message contains the sums of the blocks
    that lie within the rank's shard, the rank's elements of the blocks that span several shards,
    and zeros elsewhere. At each position, at most one rank's message is not zero, so adding all
    messages causes no rounding.

    Args:
        numel: the number of elements of the full parameter.
        bounds: the start and stop of each rank's shard, in elements of the parameter.
    """

    def __init__(self, numel: int, bounds: Sequence[tuple[int, int]]) -> None:
        self._numel = numel
        self._num_blocks = -(-numel // BLOCK)
        edges = {edge for start, stop in bounds if start < stop for edge in (start, stop)}
        self._cut = sorted({edge // BLOCK for edge in edges if edge % BLOCK and edge != numel})

    @property
    def message_numel(self) -> int:
        """The number of elements in a message: 1 per block, plus `BLOCK` per split block."""
        return self._num_blocks + len(self._cut) * BLOCK

    def write(self, message: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Write this rank's block sums, and its elements of split blocks, into the message.

        Args:
            message: [message_numel], float64, initially all zeros.
            values: [n], this rank's shard of the parameter.
            start: the index of the first element of `values` within the parameter.
        """
        stop = start + values.numel()
        first, last = -(-start // BLOCK), stop // BLOCK
        if stop == self._numel:
            last = self._num_blocks
        if first < last:
            inside = values[first * BLOCK - start : last * BLOCK - start]
            message[first:last] = block_sums(inside)
        for row, block in enumerate(self._cut):
            begin, end = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            if begin < end:
                at = self._num_blocks + row * BLOCK - block * BLOCK
                message[at + begin : at + end] = values[begin - start : end - start]

    def read(self, message: torch.Tensor) -> torch.Tensor:
        """Return the full parameter's `block_sums`, given the sum of all ranks' messages.

        The result shares memory with `message`, which is overwritten.
        """
        sums = message[: self._num_blocks]
        if self._cut:
            sums[self._cut] = block_sums(message[self._num_blocks :])
        return sums
