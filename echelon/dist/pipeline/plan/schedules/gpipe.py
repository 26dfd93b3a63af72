"""GPipe: every forward pass, then every backward pass.

GPipe is the simplest schedule and needs the most memory, because the activations of all
micro-batches are stored at the same time.
"""

from __future__ import annotations

from echelon.dist.pipeline.plan.action import Action, backward, forward


def gpipe(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the rows of a GPipe plan, with one stage per rank."""
    microbatches = range(num_microbatches)
    return [
        [forward(rank, m) for m in microbatches] + [backward(rank, m) for m in microbatches]
        for rank in range(num_ranks)
    ]
