"""Compute the order in which a rank runs its chunks if micro-batches are processed in rounds.

A round of micro-batches passes through chunk 0, then chunk 1, and so on, before the next round
begins; in the backward direction, the last chunk comes first. A round has as many micro-batches as
there are ranks, so the first micro-batch of a round returns to rank 0 just after the round's last
micro-batch has left rank 0. If the number of micro-batches is not a multiple of the number of
ranks, some or all rounds are larger, and their sizes differ by at most one. Fewer micro-batches
than ranks form a single round.
"""

from __future__ import annotations

from itertools import accumulate


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the number of micro-batches in each round, larger rounds first."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def visits(sizes: list[int], num_chunks: int, *, is_backward: bool) -> list[tuple[int, int]]:
    """Return the (chunk, micro-batch) pairs of a rank's forward or backward passes, in order."""
    chunks = range(num_chunks - 1, -1, -1) if is_backward else range(num_chunks)
    starts = [0, *accumulate(sizes)]
    return [
        (chunk, start + offset)
        for start, size in zip(starts, sizes, strict=False)
        for chunk in chunks
        for offset in range(size)
    ]
