"""Execute a pipeline with any schedule.

Each rank executes its row of the plan, one computation at a time. Results are sent immediately, and
the rank waits for its sends only at the end of the step. Receives are posted ahead of time, and the
rank waits for a receive only when it uses the data. Messages use channels (`messages/`), which
other traffic cannot block.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.dist import heap
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.agreement import (
    agree,
    check_shared,
    check_stages,
    plan_of,
)
from echelon.dist.pipeline.execute.batch import check_batch, cut_off, pass_on, split_batch
from echelon.dist.pipeline.execute.failure import ending_on_failure
from echelon.dist.pipeline.execute.messages.exchange import Exchange, Routes
from echelon.dist.pipeline.execute.messages.links import open_links
from echelon.dist.pipeline.execute.names import StageModules
from echelon.dist.pipeline.execute.parameters import gradient_sync, groups_of, reshard
from echelon.dist.pipeline.execute.parameters import unshard as gather
from echelon.dist.pipeline.execute.replicas import average_gradients
from echelon.dist.pipeline.execute.separate import Listener, SeparateStep
from echelon.dist.pipeline.execute.stage import LossFn, Stage
from echelon.dist.pipeline.execute.step import Step
from echelon.dist.pipeline.execute.ties import Ties
from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.lower import add_sharding, order_messages
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.runtime import world


class Pipeline:
    """A model split into stages, with one or more stages on each rank of a group.

        stages = [Stage(module, index=group.rank, num_stages=group.size)]
        pipe = Pipeline(stages, group=group, schedule="1f1b", num_microbatches=8, loss_fn=loss_fn)
        losses = pipe.step(inputs, targets)

    If a stage's module is sharded (`fully_shard`), its parameters are gathered before the
    computations that use them and released afterwards, and its gradients are reduced once per step.

    Args:
        stages: this rank's stages, placed as the schedule requires. Rank r of p holds stage r; with
            several chunks, stages r, r + p, ...; in a V (zbv, dualpipev), stages r and 2p - 1 - r.
        group: the pipeline's ranks; None means the world.
        schedule: the name of a schedule (see `schedule()`), a `Plan`, or the path of a CSV file.
        num_microbatches: the number of micro-batches into which a batch is split along dim 0. Not
            needed if `schedule` is a plan or a CSV file.
        loss_fn: called with the last stage's output and the targets; returns a scalar. None if the
            last stage's output is the loss.
        ties: the parameters that stages share, each as `["0:token.weight", "3:head.weight"]`.
        replicas: ranks that run identical stages on different data; gradients of unsharded
            parameters are averaged over them. None if there are no replicas, or if all parameters
            are sharded.

    The constructor is collective: every rank of the group must call it with the same arguments, and
    it blocks until all ranks have done so or the group's timeout expires. If a step fails on one
    rank, all groups that the step uses are aborted on every rank. The other ranks' errors name the
    failed rank. The pipeline cannot be used afterwards.

    Raises:
        ValueError: stages, schedule and group do not match, or the ranks' arguments differ.
        PlanError: the schedule cannot be executed.
        CollectiveError: a rank was lost or did not join within the group's timeout.

    Example:
        >>> group = dist.init()  # on each of 2 ranks
        >>> layers = [nn.Linear(8, 8) for _ in range(4)]
        >>> module = split(layers, num_stages=2)[group.rank]
        >>> stage = Stage(module, index=group.rank, num_stages=2)
        >>> pipe = Pipeline([stage], num_microbatches=4, loss_fn=nn.MSELoss())
        >>> losses = pipe.step(torch.ones(8, 8), torch.zeros(8, 8))
        >>> losses is None if group.rank == 0 else len(losses) == 4  # the last stage has them
        True
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        group: ProcessGroup | None = None,
        schedule: str | Path | Plan = "1f1b",
        num_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        ties: Sequence[Sequence[str]] = (),
        replicas: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(group, ProcessGroup | None):
            raise ValueError(f"group must be a ProcessGroup or None, got {group!r}")
        self.group = world() if group is None else group
        self.stages = sorted(stages, key=lambda stage: stage.index)
        self.loss_fn = loss_fn
        self.plan = plan_of(schedule, self.group.size, num_microbatches, len(self.stages))
        check_stages(self.stages, self.plan, self.group.rank)
        check_shared(self.stages, self.plan, ties)
        self._ties = Ties(ties, self.stages, self.plan.rank_of_stage)
        devices = (stage.device for stage in self.stages)
        self._device = next((one for one in devices if one is not None), torch.device("cpu"))
        name = agree(self.group, self.plan, ties, self._ties, self._device)
        self._replicas = replicas
        self._failed = False
        self._numbers = itertools.count()
        self._by_index = {stage.index: stage for stage in self.stages}
        if all(p.device.type == "cpu" for stage in self.stages for p in stage.module.parameters()):
            heap.keep()
        if self._device.type not in ("cpu", "meta"):  # a group's first operation on a device is
            self.group.all_reduce(torch.zeros(1, device=self._device))  # collective
        self._routes = Routes(self.plan, self.group.rank)
        self._links = open_links(self.group, name, self._routes.peers(), self._device)
        self._ties.begin(self.group, name, self._device)

    @cached_property
    def _ordered(self) -> Plan:
        return order_messages(self.plan)

    @cached_property
    def _sharded_row(self) -> list[Action]:
        return add_sharding(self._ordered).rows[self.group.rank]

    @cached_property
    def module(self) -> StageModules:
        """This rank's stages as one module for checkpoints.

        The names in the module are those in the whole model. A checkpoint's state can contain the
        pipeline itself: `save(path, {"model": pipe})`.
        """
        return StageModules(self.stages)

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks that run identical stages on different data, or None."""
        return self._replicas

    @property
    def num_ties(self) -> int:
        """The number of parameters that stages share."""
        return len(self._ties)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stages."""
        return self.module.parameters()

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches into which a batch is split."""
        return self.plan.num_microbatches

    @property
    def has_first(self) -> bool:
        """True if this rank holds the first stage, which receives the inputs."""
        return self.stages[0].is_first

    @property
    def has_last(self) -> bool:
        """True if this rank holds the last stage, which computes the losses."""
        return self.stages[-1].is_last

    def step(
        self, inputs: Any = None, targets: Any = None, *, loss_scale: float = 1.0
    ) -> list[torch.Tensor] | None:
        """Run the forward and backward passes of a batch; average gradients over its micro-batches.

        Gradients are added to the parameters' `.grad`, as in autograd. The caller runs the
        optimizer. Tensor sizes can differ between steps and between micro-batches.

        Args:
            inputs: on the first stage's rank, a tensor or a tuple of tensors, [batch_size, ...].
                Input tensors can require gradients.
            targets: on the last stage's rank, the targets in the same form as the inputs.
            loss_scale: the current scale of a gradient scaler, which must be the same on all ranks.
                It multiplies the gradients but not the losses. `GradScaler(over=...)` with a group
                of all stages' ranks then unscales the gradients, and skips the optimizer step on
                all ranks if any rank had an overflow.

        Returns:
            On the last stage's rank, `num_microbatches` scalar losses; None on other ranks.

        Raises:
            ValueError: inputs or targets are missing or cannot be split, `loss_scale` is invalid,
                or a loss does not require gradients. In the last case, all groups that the step
                uses are aborted.
            CollectiveError: a rank was lost or exceeded the group's timeout.
        """
        if not torch.is_grad_enabled():
            raise ValueError("step() computes gradients, but they are disabled: use evaluate()")
        if not (loss_scale > 0 and math.isfinite(loss_scale)):
            raise ValueError(f"loss_scale must be positive and finite, got {loss_scale!r}")
        inputs, computed = cut_off(inputs) if self.has_first else (inputs, [])
        step = self._start(inputs, targets, seed=loss_scale / self.num_microbatches)
        self._ties.set_aside()
        with self._ending_on_failure("step"):
            row = self._sharded_row if step.sharded else self._ordered.rows[self.group.rank]
            with contextlib.ExitStack() as stack:
                for stage in step.sharded:
                    stack.enter_context(gradient_sync(stage.module, enabled=False))
                step.carry_out(row)
            if self._replicas is not None and self._replicas.size > 1:
                average_gradients(self.stages, self._replicas)
            self._ties.sum_gradients()
            pass_on(computed)
        return [loss.detach() for loss in step.results] if self.has_last else None

    def compute_separately(
        self,
        inputs: Sequence[list[torch.Tensor]],
        targets: Sequence[list[torch.Tensor]],
        listener: Listener,
    ) -> list[torch.Tensor]:
        """Run the forward and backward passes of one batch without summing or reducing gradients.

        `echelon.train.same_bits` builds on this method. Sharded stages must already be gathered.

        Args:
            inputs: on the first stage's rank, the tensors of each micro-batch.
            targets: on the last stage's rank, the tensors of each micro-batch's targets.
            listener: an object that sets the RNG state before each forward pass, and removes the
                gradients from `.grad` after each backward pass.

        Returns:
            On the last stage's rank, the loss of each micro-batch; an empty list on other ranks.

        Raises:
            ValueError: the pipeline failed earlier, or a loss does not require gradients.
            CollectiveError: a rank was lost or exceeded the group's timeout.
        """
        self._check_usable()
        exchange = Exchange(self.group, self._routes, self._links, self._device, backward=True)
        step = SeparateStep(
            self._by_index,
            exchange,
            self.loss_fn,
            list(inputs),
            list(targets),
            num_microbatches=self.num_microbatches,
            listener=listener,
        )
        with self._ending_on_failure("step"):
            step.carry_out(self._ordered.rows[self.group.rank])
        return [loss.detach() for loss in step.results] if self.has_last else []

    def evaluate(self, inputs: Any = None, targets: Any = None) -> list[Any] | None:
        """Run forward passes only, without gradients.

        Args:
            inputs: as in `step`.
            targets: as in `step`; None to return outputs instead of losses.

        Returns:
            On the last stage's rank, the loss of each micro-batch or, if `targets` is None, the
                output of each micro-batch; None on other ranks.

        Raises:
            ValueError, CollectiveError: as in `step`.
        """
        step = self._start(inputs, targets, seed=None)
        kinds = (Kind.FORWARD, Kind.RECV_F)
        row = [
            part
            for action in self._ordered.rows[self.group.rank]
            for part in action.computations or (action,)
            if part.kind in kinds
        ]
        with self._ending_on_failure("evaluate"), torch.no_grad():
            for stage in step.sharded:
                gather(stage.module)
            step.carry_out(row)
            for stage in step.sharded:
                reshard(stage.module)
        return step.results if self.has_last else None

    def _start(self, inputs: Any, targets: Any, *, seed: float | None) -> Step:
        self._check_usable()
        backward = seed is not None
        needs_targets = backward and self.loss_fn is not None
        check_batch(self.stages, inputs, targets, needs_targets=needs_targets)
        num = self.num_microbatches
        return Step(
            self._by_index,
            Exchange(self.group, self._routes, self._links, self._device, backward=backward),
            self.loss_fn,
            split_batch("inputs", inputs, num) if self.has_first else [],
            split_batch("targets", targets, num) if self.has_last and targets is not None else [],
            num_microbatches=num,
            seed=seed,
        )

    def _check_usable(self) -> None:
        if self._failed:
            raise ValueError(
                "this pipeline failed in an earlier step: create new groups and a new pipeline"
            )

    def _ending_on_failure(self, call: str) -> contextlib.AbstractContextManager[None]:
        rank = self.group.ranks[self.group.rank]
        return ending_on_failure(call, next(self._numbers), rank, self._fail)

    def _fail(self) -> Iterator[ProcessGroup]:
        """Prevent further steps, and return the groups that must be aborted.

        Another step is impossible because the channels still contain messages of the failed step.
        """
        self._failed = True
        for stage in self.stages:
            stage.forget()
        return self._groups()

    def _groups(self) -> Iterator[ProcessGroup]:
        """Yield the groups in which other ranks might be waiting for this rank during a step."""
        yield self.group
        if self._replicas is not None:
            yield self._replicas
        for stage in self.stages:
            yield from groups_of(stage)
