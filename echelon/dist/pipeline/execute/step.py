"""Execute one rank's row of a plan for one batch.

The black box records each computation as a `compute` span with the action's text (`1F3`), and each
wait for another rank as a `pipeline` span that names the missing data and its sender. The analysis
of a hang can therefore name the action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.dist.pipeline.execute.messages.exchange import Exchange, received
from echelon.dist.pipeline.execute.parameters import is_sharded, reduce_gradients, reshard
from echelon.dist.pipeline.execute.parameters import unshard as gather
from echelon.dist.pipeline.execute.stage import LossFn, Stage, tensors_of
from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.needs import Product, Thing
from echelon.recorder import span

_AHEAD = 2  # computations whose receives are posted before their turn


class Step:
    """A step or an evaluation on one rank.

    Args:
        stages: this rank's stages, keyed by index.
        exchange: the exchange with other ranks.
        loss_fn: see `Pipeline`.
        inputs, targets: the inputs and targets of each micro-batch; empty on ranks without them.
        num_microbatches: the number of micro-batches in the batch.
        seed: the gradient of each micro-batch's loss; None to run only forward passes.
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
        seed: float | None,
    ) -> None:
        self._stages = stages
        self._exchange = exchange
        self._loss_fn = loss_fn
        self._inputs = inputs
        self._targets = targets
        self._seed = seed
        self.sharded = [stage for stage in stages.values() if is_sharded(stage)]
        self.results: list[Any] = [None] * num_microbatches

    def carry_out(self, row: list[Action]) -> None:
        """Execute a row of the plan, including its messages; return once all sends have completed.

        Each send starts immediately after the computation that produces its data. Each receive is
        posted when its position in the row is reached, or earlier: usually a few computations
        before its data is used.
        """
        steps = [part for action in row for part in action.computations or (action,)]
        computations = [action for action in steps if action.is_compute]
        for soon in computations[:_AHEAD]:
            self._exchange.want_for(soon)
        number = _AHEAD
        for action in steps:
            if action.is_compute:
                self._exchange.want_for(*computations[number : number + 1])
                number += 1
            self._do(action)
        self._exchange.finish()

    def _do(self, action: Action) -> None:
        stage = self._stages[action.stage]
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            self._exchange.want([received(action)])
        elif action.kind is Kind.FORWARD:
            self._forward(stage, action)
        elif action.kind is Kind.WEIGHT_GRAD:
            with span("compute", str(action)):
                stage.weight_half(action.microbatch)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            self._back(stage, action)
        elif stage in self.sharded:
            self._shard(stage, action)

    def _shard(self, stage: Stage, action: Action) -> None:
        with span("pipeline", str(action)):
            if action.kind is Kind.UNSHARD:
                gather(stage.module)
            elif action.kind is Kind.RESHARD:
                reshard(stage.module)
            elif action.kind is Kind.REDUCE_GRAD:
                reduce_gradients(stage.module)

    def _forward(self, stage: Stage, action: Action) -> None:
        microbatch = action.microbatch
        if stage.is_first:
            inputs = self._inputs[microbatch]
        else:
            before = Thing(Product.OUTPUT, stage.index - 1, microbatch)
            inputs = self._exchange.take(before, action)
        with span("compute", str(action)):
            outputs, sent = self._compute(stage, microbatch, inputs)
            if self._seed is not None:
                stage.keep(microbatch, inputs, outputs)
        if not stage.is_last:
            self._exchange.put(Thing(Product.OUTPUT, stage.index, microbatch), sent)

    def _compute(
        self, stage: Stage, microbatch: int, inputs: list[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run a stage's forward pass; return its result and the tensors to send.

        The last stage's result is the loss or, in an evaluation without targets, the outputs.
        """
        outputs = stage.module(*inputs)
        if not stage.is_last:
            return outputs, tensors_of(outputs, stage)
        self.results[microbatch] = self._loss(microbatch, outputs)
        return self.results[microbatch], []

    def _loss(self, microbatch: int, outputs: Any) -> Any:
        loss = outputs
        if self._loss_fn is not None and self._targets:
            targets = self._targets[microbatch]
            loss = self._loss_fn(outputs, targets[0] if len(targets) == 1 else tuple(targets))
        elif self._seed is None:
            return outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"the loss of a micro-batch must be a scalar tensor, got {found}")
        return loss

    def _back(self, stage: Stage, action: Action) -> None:
        microbatch = action.microbatch
        assert self._seed is not None, action
        if stage.is_last:
            loss = self.results[microbatch]
            if not loss.requires_grad:
                raise ValueError(
                    f"the loss of micro-batch {microbatch} does not require gradients, so the step "
                    "would train nothing: compute it from the output, without detach() or item()"
                )
            gradients = [torch.full_like(loss, self._seed)]
            self.results[microbatch] = loss.detach()
        else:
            after = Thing(Product.INPUT_GRAD, stage.index + 1, microbatch)
            gradients = self._exchange.take(after, action)
        with span("compute", str(action)):
            whole = action.kind is Kind.BACKWARD
            half = stage.backward if whole else stage.input_half
            own = half(microbatch, gradients)
        if not stage.is_first:
            self._exchange.put(Thing(Product.INPUT_GRAD, stage.index, microbatch), own)
