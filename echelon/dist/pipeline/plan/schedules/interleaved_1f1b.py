"""Interleaved 1F1B: each rank holds several chunks, which shortens the bubble.

Rank r of p holds stages r, r + p, r + 2p, ... Before its first backward pass, a rank runs one round
of forward passes for each of its chunks except the last. It then runs one more forward pass, plus
two for each rank after it in the pipeline, because a micro-batch passes to the last rank and back.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, backward, forward
from echelon.dist.pipeline.plan.schedules.rounds import round_sizes, visits


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    """Return the rows of interleaved 1F1B, with stages r, r + p, ... on rank r of p."""
    sizes = round_sizes(num_ranks, num_microbatches)
    forwards = visits(sizes, num_chunks, is_backward=False)
    backwards = visits(sizes, num_chunks, is_backward=True)
    rows = []
    for rank in range(num_ranks):
        ahead = (num_chunks - 1) * sizes[0] + 2 * (num_ranks - 1 - rank) + 1
        ahead = min(ahead, len(forwards))
        row = [_forward(visit, rank, num_ranks) for visit in forwards[:ahead]]
        for number, (chunk, m) in enumerate(backwards):
            row.append(backward(rank + chunk * num_ranks, m))
            if number + ahead < len(forwards):
                row.append(_forward(forwards[number + ahead], rank, num_ranks))
        rows.append(row)
    return rows


def _forward(visit: tuple[int, int], rank: int, num_ranks: int) -> Action:
    chunk, microbatch = visit
    return forward(rank + chunk * num_ranks, microbatch)
