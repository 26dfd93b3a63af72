"""Run a step that keeps the gradients of different micro-batches separate.

A listener collects the gradients after each full backward pass, and after each half of a split
backward pass. The RNG state is passed from stage to stage with each micro-batch's activations, so
that a micro-batch draws the same random numbers no matter where the model is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from echelon.dist.pipeline.execute.messages.exchange import Exchange
from echelon.dist.pipeline.execute.stage import LossFn, Stage
from echelon.dist.pipeline.execute.step import Step
from echelon.dist.pipeline.plan.action import Action, Kind


class Listener(Protocol):
    """Callbacks that run before and after a stage's computations for each micro-batch."""

    def random(
        self, stage: Stage, microbatch: int, state: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        """Return a context manager that sets the RNG state for a forward pass.

        The context manager restores the previous state afterwards.

        Args:
            stage: the stage whose forward pass runs.
            microbatch: the index of the micro-batch in the batch.
            state: the RNG state after the previous stage; None in the first stage.
        """

    def random_state(self, stage: Stage) -> torch.Tensor:
        """Return the RNG state to pass to the next stage, as a uint8 tensor."""

    def computed(self, stage: Stage, microbatch: int, *, is_complete: bool) -> None:
        """Move the stage's gradients out of its parameters after a backward pass.

        Args:
            stage: the stage whose parameters have gradients.
            microbatch: the index of the micro-batch in the batch.
            is_complete: False after the first half of a backward pass.
        """


class SeparateStep(Step):
    """A step on one rank that keeps the gradients of different micro-batches separate.

    Sharded stages must already be gathered. Gradients are not reduced.

    Args:
        stages: see `Step`.
        exchange: see `Step`.
        loss_fn: see `Step`.
        inputs: see `Step`.
        targets: see `Step`.
        num_microbatches: see `Step`.
        listener: the object that receives the gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        exchange: Exchange,
        loss_fn: LossFn | None,
        inputs: list[list[torch.Tensor]],
        targets: list[list[torch.Tensor]],
        *,
        num_microbatches: int,
        listener: Listener,
    ) -> None:
        super().__init__(
            stages, exchange, loss_fn, inputs, targets,
            num_microbatches=num_microbatches, seed=1.0,
        )  # fmt: skip
        self.sharded = []
        self._listener = listener

    def _do(self, action: Action) -> None:
        super()._do(action)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD, Kind.INPUT_GRAD):
            stage = self._stages[action.stage]
            is_complete = action.kind is not Kind.INPUT_GRAD
            self._listener.computed(stage, action.microbatch, is_complete=is_complete)

    def _compute(
        self, stage: Stage, microbatch: int, inputs: list[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        state: torch.Tensor | None = None
        if not stage.is_first:
            *inputs, state = inputs
        with self._listener.random(stage, microbatch, state):
            outputs, sent = super()._compute(stage, microbatch, inputs)
            if not stage.is_last:
                sent = [*sent, self._listener.random_state(stage)]
        return outputs, sent
