"""Build a row and number its micro-batches, so that a schedule only has to name stages.

Micro-batches pass through a stage in order. If the row already contains n forward passes of a
stage, the stage's next forward pass is therefore for micro-batch n. The same applies to backward
passes.
"""

from __future__ import annotations

from collections import Counter, deque

from echelon.dist.pipeline.plan.action import (
    Action,
    Kind,
    backward,
    forward,
    input_grad,
    overlap,
    weight_grad,
)


class RowBuilder:
    """A row of actions under construction."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._owed: deque[tuple[int, int]] = deque()  # weight gradients, oldest first
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()

    def num_forwards(self, stage: int) -> int:
        """Return how many forward passes of a stage the row contains so far."""
        return self._forwards[stage]

    def owes(self, stage: int) -> bool:
        """Return whether weight gradients of a stage are deferred and not yet in the row."""
        return any(owed == stage for owed, _ in self._owed)

    def forward(self, *stages: int) -> None:
        """Append the next forward pass of each given stage."""
        self.actions += [self._forward(stage) for stage in stages]

    def backward(self, stage: int) -> None:
        """Append a stage's next full backward pass."""
        self.actions.append(self._backward(stage))

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        """Append a forward pass and a full backward pass as one action."""
        self.actions.append(overlap(self._forward(forward_stage), self._backward(backward_stage)))

    def inputs(self, stage: int) -> None:
        """Append the first half of a stage's next backward pass, and defer the second half.

        The halves compute the input gradients and the weight gradients, respectively.
        """
        microbatch = self._count(self._backwards, stage)
        self._owed.append((stage, microbatch))
        self.actions.append(input_grad(stage, microbatch))

    def weights(self, stage: int | None = None) -> None:
        """Append the oldest deferred weight-gradient action of `stage`; None means any stage."""
        owed = next(pair for pair in self._owed if stage in (None, pair[0]))
        self._owed.remove(owed)
        self.actions.append(weight_grad(*owed))

    def _forward(self, stage: int) -> Action:
        return forward(stage, self._count(self._forwards, stage))

    def _backward(self, stage: int) -> Action:
        return backward(stage, self._count(self._backwards, stage))

    @staticmethod
    def _count(counts: Counter[int], stage: int) -> int:
        counts[stage] += 1
        return counts[stage] - 1


def kept(action: Action, num_microbatches: int) -> list[Action]:
    """Return `[action]` without the parts for surplus micro-batches, or [] if no part remains."""
    parts = [part for part in action.computations if part.microbatch < num_microbatches]
    if action.kind is not Kind.OVERLAP:
        return parts
    return [overlap(*parts)] if parts else []
