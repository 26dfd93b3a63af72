"""Interleaved zero bubble: interleaved 1F1B with the backward pass in two halves.

Other ranks wait only for input gradients, so weight gradients can fill idle time. On rank r, the
weight gradients lag r computations behind the input gradients, and the last r weight gradients fill
the idle time at the end. If the number of micro-batches is a multiple of the number of ranks, each
rank holds the activations of at most (chunks x ranks) pairs of stage and micro-batch.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, forward, input_grad, weight_grad
from echelon.dist.pipeline.plan.schedules.rounds import round_sizes, visits


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, num_chunks: int
) -> list[list[Action]]:
    """Return the rows of an interleaved zero-bubble schedule.

    Rank r of p has the stages r, r + p, ...
    """
    sizes = round_sizes(num_ranks, num_microbatches)
    forwards = visits(sizes, num_chunks, is_backward=False)
    backwards = visits(sizes, num_chunks, is_backward=True)
    rows = []
    for rank in range(num_ranks):
        ahead = min((num_chunks - 1) * sizes[0] + num_ranks - rank, len(forwards))
        row = [_forward(visit, rank, num_ranks) for visit in forwards[:ahead]]
        for number, (chunk, m) in enumerate(backwards):
            row.append(input_grad(rank + chunk * num_ranks, m))
            if number >= rank:
                row.append(_weights(backwards[number - rank], rank, num_ranks))
            if number + ahead < len(forwards):
                row.append(_forward(forwards[number + ahead], rank, num_ranks))
        held_back = backwards[max(0, len(backwards) - rank) :]
        rows.append(row + [_weights(visit, rank, num_ranks) for visit in held_back])
    return rows


def _forward(visit: tuple[int, int], rank: int, num_ranks: int) -> Action:
    chunk, microbatch = visit
    return forward(rank + chunk * num_ranks, microbatch)


def _weights(visit: tuple[int, int], rank: int, num_ranks: int) -> Action:
    chunk, microbatch = visit
    return weight_grad(rank + chunk * num_ranks, microbatch)
