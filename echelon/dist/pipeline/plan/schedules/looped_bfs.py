"""Looped breadth-first: GPipe over several chunks a rank, a whole chunk before the next.

Its bubble is the interleaved one's, its memory GPipe's; each chunk's parameters are needed once
each way, which suits sharded ones.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, backward, forward


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[list[Action]]:
    """Return the rows: stages r, r + p, ... on rank r."""
    microbatches = range(num_microbatches)
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        row = [forward(stage, m) for stage in stages for m in microbatches]
        row += [backward(stage, m) for stage in reversed(stages) for m in microbatches]
        rows.append(row)
    return rows
