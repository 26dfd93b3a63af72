"""Pipeline: one executor for every schedule.

A rank carries out its row of the plan, computation by computation. What it needs is posted ahead
and waited for when it is used; what it makes leaves at once and is never waited for before the
step's end. So the order of messages cannot deadlock: only a plan whose computations wait for each
other in a ring could, and such a plan is refused before it runs.

Each computation is a span `compute` in the black box, with the action's text (`1F3`); each wait for
another rank a span `pipeline` that says what for and from whom. So a hang names its action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from echelon.dist import heap
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.batch import check_batch, split_batch
from echelon.dist.pipeline.execute.exchange import Exchange
from echelon.dist.pipeline.execute.mail import Room
from echelon.dist.pipeline.execute.parameters import (
    gradient_sync,
    is_sharded,
    reduce_gradients,
    reshard,
)
from echelon.dist.pipeline.execute.parameters import unshard as gather
from echelon.dist.pipeline.execute.replicas import average_gradients
from echelon.dist.pipeline.execute.stage import LossFn, Stage, tensors_of
from echelon.dist.pipeline.execute.ties import Ties
from echelon.dist.pipeline.plan.action import Action, Kind
from echelon.dist.pipeline.plan.catalogue import schedule as schedule_of
from echelon.dist.pipeline.plan.check import check_plan
from echelon.dist.pipeline.plan.lower import add_sharding
from echelon.dist.pipeline.plan.needs import Product, Thing
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.runtime import world
from echelon.recorder import span

_AHEAD = 2  # computations whose receives are posted before their turn


class Pipeline:
    """A model in stages, one or several on each rank of a group.

        stages = [Stage(module, index=group.rank, num_stages=group.size)]
        pipe = Pipeline(stages, group=group, schedule="1f1b", num_microbatches=8, loss_fn=loss_fn)
        losses = pipe.step(inputs, targets)

    Where a stage's module is sharded (`fully_shard`), parameters are gathered and given back as the
    schedule goes, and gradients are reduced once a step.

    Args:
        stages: this rank's, as the schedule places them: stage r on rank r; with several chunks
            stages r, r + p, ...; in a V (zbv, dualpipev) r and 2p - 1 - r.
        group: the pipeline's ranks; None: the world.
        schedule: a name (see `schedule()`), a `Plan`, or the path of a CSV file.
        num_microbatches: into which a batch is split along dim 0. A plan knows it by itself.
        loss_fn: called with the last stage's output and the targets, returns a scalar; None: the
            last stage's output is the loss.
        ties: parameters that stages share, each as `["0:token.weight", "3:head.weight"]`.
        replicas: ranks that run equal stages on other data; what is not sharded is averaged among
            them. None: there are none, or all is sharded.

    Making one is collective: every rank of the group does, with the same arguments, and blocks
    until all have come. After a step that failed it is of no further use.

    Raises:
        ValueError: stages, schedule and group do not fit, or the ranks' arguments differ.
        PlanError: the schedule cannot be carried out.
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
        self.group = world() if group is None else group
        self.stages = sorted(stages, key=lambda stage: stage.index)
        self.loss_fn = loss_fn
        self.plan = _plan_of(schedule, self.group.size, num_microbatches, len(self.stages))
        _check_stages(self.stages, self.plan, self.group.rank)
        _check_agreement(self.group, self.plan, ties)
        self._replicas = replicas
        self._by_index = {stage.index: stage for stage in self.stages}
        self._ties = Ties(ties, self.stages, self.plan.rank_of_stage, self.group)
        self._failed = False
        self._rooms: dict[int, Room] = {}
        if all(p.device.type == "cpu" for stage in self.stages for p in stage.module.parameters()):
            heap.keep()
        device = self.stages[0].device
        if device.type not in (
            "cpu",
            "meta",
        ):  # a group's first operation on a device is collective
            self.group.all_reduce(torch.zeros(1, device=device))
        self._ties.begin()

    @cached_property
    def _sharded_row(self) -> list[Action]:
        return add_sharding(self.plan).rows[self.group.rank]

    @property
    def num_microbatches(self) -> int:
        """Into how many a batch is split."""
        return self.plan.num_microbatches

    @property
    def has_first(self) -> bool:
        """Whether this rank's stages take the inputs."""
        return self.stages[0].is_first

    @property
    def has_last(self) -> bool:
        """Whether this rank's stages take the targets and make the losses."""
        return self.stages[-1].is_last

    def step(self, inputs: Any = None, targets: Any = None) -> list[torch.Tensor] | None:
        """Run forwards and backwards of one batch; gradients are averaged over micro-batches.

        They are added to the parameters' `.grad`, as autograd does; the optimizer is yours. Sizes
        may differ from step to step and from micro-batch to micro-batch.

        Args:
            inputs: on the first stage's rank: a tensor, or a tuple of them, [batch_size, ...].
            targets: on the last stage's rank, likewise.

        Returns:
            On the last stage's rank `num_microbatches` losses, scalars; None elsewhere.

        Raises:
            ValueError: inputs or targets are missing or cannot be split.
            CollectiveError: a rank is lost or did not come within the group's timeout.
        """
        if not torch.is_grad_enabled():
            raise ValueError("step() computes gradients, and they are disabled: use evaluate()")
        run = self._start(inputs, targets, backward=True)
        self._ties.set_aside()
        with self._poisoning():
            row = self._sharded_row if run.sharded else self.plan.rows[self.group.rank]
            with contextlib.ExitStack() as stack:
                for stage in run.sharded:
                    stack.enter_context(gradient_sync(stage.module, enabled=False))
                run.carry_out(row)
            if self._replicas is not None and self._replicas.size > 1:
                average_gradients(self.stages, self._replicas)
            self._ties.sum_gradients()
        return [loss.detach() for loss in run.results] if self.has_last else None

    def evaluate(self, inputs: Any = None, targets: Any = None) -> list[Any] | None:
        """Run forwards only, without gradients.

        Args:
            inputs, targets: as `step`; without targets there is no loss.

        Returns:
            On the last stage's rank the losses, or without targets its outputs, by micro-batch;
            None elsewhere.

        Raises:
            ValueError, CollectiveError: as `step`.
        """
        run = self._start(inputs, targets, backward=False)
        row = [
            part
            for action in self.plan.rows[self.group.rank]
            for part in action.computations
            if part.kind is Kind.FORWARD
        ]
        with self._poisoning(), torch.no_grad():
            for stage in run.sharded:
                gather(stage.module)
            run.carry_out(row)
            for stage in run.sharded:
                reshard(stage.module)
        return run.results if self.has_last else None

    def _start(self, inputs: Any, targets: Any, *, backward: bool) -> _Run:
        if self._failed:
            raise ValueError("this pipeline failed in an earlier step: make groups and it anew")
        needs_targets = backward and self.loss_fn is not None
        check_batch(self.stages, inputs, targets, needs_targets=needs_targets)
        num = self.num_microbatches
        return _Run(
            self,
            split_batch("inputs", inputs, num) if self.has_first else [],
            split_batch("targets", targets, num) if self.has_last and targets is not None else [],
            backward=backward,
        )

    @contextlib.contextmanager
    def _poisoning(self) -> Any:
        """After a failure messages are left over: no step may follow."""
        try:
            yield
        except BaseException:
            self._failed = True
            for stage in self.stages:
                stage.forget()
            raise


class _Run:
    """One step, or one evaluation, on one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: list[list[torch.Tensor]],
        targets: list[list[torch.Tensor]],
        *,
        backward: bool,
    ) -> None:
        self._plan = pipeline.plan
        self._loss_fn = pipeline.loss_fn
        self._stages = pipeline._by_index
        self._inputs = inputs
        self._targets = targets
        self._backward = backward
        devices = {index: stage.device for index, stage in self._stages.items()}
        self._exchange = Exchange(
            pipeline.group, pipeline.plan, devices, pipeline._rooms, backward=backward
        )
        self.sharded = [stage for stage in pipeline.stages if is_sharded(stage)]
        self.results: list[Any] = [None] * pipeline.num_microbatches

    def carry_out(self, row: list[Action]) -> None:
        """Go through a row; return when everything that was sent is gone."""
        steps = [part for action in row for part in action.computations or (action,)]
        for number, action in enumerate(steps):
            if action.is_compute:
                coming = steps[number : number + _AHEAD + 1]
                self._exchange.want(one for one in coming if one.is_compute)
            self._do(action)
        self._exchange.finish()

    def _do(self, action: Action) -> None:
        stage = self._stages[action.stage]
        if action.kind is Kind.FORWARD:
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
            outputs = stage.module(*inputs)
            if stage.is_last:
                outputs = self._loss(microbatch, outputs)
                self.results[microbatch] = outputs
            if self._backward:
                stage.keep(microbatch, inputs, outputs)
        if not stage.is_last:
            thing = Thing(Product.OUTPUT, stage.index, microbatch)
            self._exchange.put(thing, tensors_of(outputs, stage))

    def _loss(self, microbatch: int, outputs: Any) -> Any:
        loss = outputs
        if self._loss_fn is not None and self._targets:
            targets = self._targets[microbatch]
            loss = self._loss_fn(outputs, targets[0] if len(targets) == 1 else tuple(targets))
        elif not self._backward:
            return outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"the loss of a micro-batch must be a scalar tensor, got {found}")
        return loss

    def _back(self, stage: Stage, action: Action) -> None:
        microbatch = action.microbatch
        if stage.is_last:
            loss = self.results[microbatch]
            gradients = [torch.full_like(loss, 1 / len(self.results))] if loss.requires_grad else []
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


def _plan_of(
    schedule: str | Path | Plan, num_ranks: int, num_microbatches: int | None, num_chunks: int
) -> Plan:
    if isinstance(schedule, str) and not schedule.endswith(".csv"):
        if num_microbatches is None:
            raise ValueError(f"schedule {schedule!r} needs num_microbatches")
        return schedule_of(schedule, num_ranks, num_microbatches, num_chunks)
    if isinstance(schedule, Plan):
        plan = schedule
        check_plan(plan)
    else:
        plan = Plan.load(schedule)
    if num_microbatches not in (None, plan.num_microbatches):
        raise ValueError(
            f"plan {plan.name!r} has {plan.num_microbatches} micro-batches, not {num_microbatches}"
        )
    if plan.num_ranks != num_ranks:
        raise ValueError(f"plan {plan.name!r} is for {plan.num_ranks} ranks, not {num_ranks}")
    return plan


def _check_stages(stages: Sequence[Stage], plan: Plan, rank: int) -> None:
    indices, expected = tuple(stage.index for stage in stages), plan.stages_of(rank)
    if indices != expected:
        raise ValueError(
            f"{plan.name} puts stages {list(expected)} on rank {rank} of the group, got "
            f"{list(indices)}"
        )
    wrong = [stage for stage in stages if stage.num_stages != plan.num_stages]
    if wrong:
        raise ValueError(f"{wrong[0]}: {plan.name} has {plan.num_stages} stages here")


def _check_agreement(group: ProcessGroup, plan: Plan, ties: Sequence[Sequence[str]]) -> None:
    """Find out before a step hangs that ranks follow different plans."""
    text = plan.to_csv() + repr([sorted(tie) for tie in ties])
    mine = [plan.name, plan.num_microbatches, crc32(text.encode())]
    for rank, theirs in enumerate(group.all_gather_object(mine)):
        if theirs != mine:
            raise ValueError(
                f"rank {group.ranks[rank]} has schedule {theirs[0]!r} with {theirs[1]} micro-"
                f"batches, this rank {mine[0]!r} with {mine[1]}, or their plans or ties differ"
            )
