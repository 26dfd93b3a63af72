"""Looped breadth-first: GPipe with several chunks per rank, processed one whole chunk at a time.

The schedule has the same bubble as interleaved 1F1B, and uses as much memory as GPipe. Each chunk's
parameters are needed once in each direction, which suits sharded stages.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, backward, forward


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    """Return the rows of a looped breadth-first schedule.

    Rank r of p has the stages r, r + p, ...
    """
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        row = [forward(stage, m) for stage in stages for m in microbatches]
        row += [backward(stage, m) for stage in reversed(stages) for m in microbatches]
        rows.append(row)
    return rows
