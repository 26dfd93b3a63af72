"""1F1B: each rank runs a backward pass as soon as it can, and then the next forward pass.

The bubble is the same as in GPipe, but rank r of p holds the activations of at most p - r
micro-batches.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, backward, forward


def one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of 1F1B, with one stage per rank."""
    return [_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    ahead = min(num_ranks - rank, num_microbatches)
    row = [forward(rank, m) for m in range(ahead)]
    for m in range(num_microbatches):
        row.append(backward(rank, m))
        if m + ahead < num_microbatches:
            row.append(forward(rank, m + ahead))
    return row
