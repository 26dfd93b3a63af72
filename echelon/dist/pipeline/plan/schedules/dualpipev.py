"""DualPipeV: two chunks per rank, placed in a V, with overlapped forward and backward passes.

Rank r of p holds stages r and 2p - 1 - r. In the steady state, each action combines a forward pass
and a backward pass, and the communication of one is hidden behind the computation of the other.
Backward passes are split only near the beginning and the end of the schedule. (Sea AI Lab derived
the schedule from DeepSeek's DualPipe by a "cut-in-half" procedure.)

The schedule is regular for 2p or more micro-batches. With fewer micro-batches, the order for 2p
micro-batches is used, and the surplus micro-batches are left out.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action
from echelon.dist.pipeline.plan.schedules.row_builder import RowBuilder, kept


def dualpipev(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of DualPipeV, with stages r and 2p - 1 - r on rank r of p."""
    regular = max(num_microbatches, 2 * num_ranks)
    rows = [_row(rank, num_ranks, regular) for rank in range(num_ranks)]
    return [[one for action in row for one in kept(action, num_microbatches)] for row in rows]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages, in the order of a forward
    behind = num_ranks - 1 - rank  # ranks between here and the corner
    row = RowBuilder()
    # Down the V until the first micro-batch has returned to the top.
    row.forward(*[down] * (2 * behind))
    row.forward(*[down, up] * (rank + 1))
    # The upper chunk's backwards begin; weight gradients fill the gaps.
    for _ in range(behind):
        row.inputs(up)
        row.weights()
        row.forward(up)
    # The steady part: a forward of one chunk beside a backward of the other.
    for number in range(num_microbatches - 2 * num_ranks + rank + 1):
        if number or behind:
            row.overlap(down, up)
        else:  # at the corner the first backward comes right after its own forward
            row.forward(down)
            row.backward(up)
        row.overlap(up, down)
    for _ in range(behind):
        row.backward(up)
        row.overlap(up, down)
    _end(row, rank, behind, down, up)
    return row.actions


def _end(row: RowBuilder, rank: int, behind: int, down: int, up: int) -> None:
    """Append the last backward passes.

    Full backward passes come first, followed by split backward passes, whose weight gradients are
    deferred.
    """
    ramp = [up, down] * (rank + 1)
    for number, stage in enumerate(ramp):
        if number <= rank:
            row.backward(stage)
        else:
            row.inputs(stage)
    for _ in range(behind):
        row.weights()
        row.inputs(down)
    while row.owes(up) or row.owes(down):
        row.weights()
