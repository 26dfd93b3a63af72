"""ZBV: two chunks per rank in a V, with the backward pass in two halves.

Rank r of p holds stages r and 2p - 1 - r, so that the last rank holds both stages at the turn of
the V, and rank 0 holds both ends. If a chunk's forward pass, input gradients and weight gradients
take equal time, each rank is idle only as long as p - 1 forward passes of a chunk take, and no rank
holds more activations than rank 0 does in 1F1B. (The schedule is from Qi et al., "Pipeline
Parallelism with Controllable Memory".)

The schedule is regular for 2p - 1 or more micro-batches. With fewer micro-batches, the order for
2p - 1 micro-batches is used, and the surplus micro-batches are left out.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action
from echelon.dist.pipeline.plan.schedules.row_builder import RowBuilder, kept


def zbv(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of ZBV, with stages r and 2p - 1 - r on rank r of p."""
    regular = max(num_microbatches, 2 * num_ranks - 1)
    rows = [_row(rank, num_ranks, regular) for rank in range(num_ranks)]
    return [[one for action in row for one in kept(action, num_microbatches)] for row in rows]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages, in the order of a forward
    to_corner = num_ranks - rank  # ranks from here to the corner, with this one
    row = RowBuilder()
    # Down the V until the first micro-batch has returned to the top.
    row.forward(*[down] * (2 * to_corner - 1))
    row.forward(*[up, down] * rank)
    # The upper chunk's backwards begin.
    for _ in range(to_corner):
        row.forward(up)
        row.inputs(up)
        row.weights(up)
    # The steady part: one of each.
    while row.num_forwards(up) < num_microbatches:
        if row.num_forwards(down) < num_microbatches:
            row.forward(down)
        row.inputs(down)
        row.weights(down)
        row.forward(up)
        row.inputs(up)
        row.weights(up)
    # The ramp's end: first what other ranks wait for, then the rest.
    for _ in range(rank):
        row.inputs(up)
        row.inputs(down)
    for _ in range(to_corner):
        row.inputs(down)
        row.weights(down)
    for stage in (up, down):
        while row.owes(stage):
            row.weights(stage)
    return row.actions
