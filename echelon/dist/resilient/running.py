"""Train step by step on all ranks; when a rank is lost, the survivors repeat the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from echelon.dist import runtime
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.membership.environment import on_loss
from echelon.dist.resilient.checks import check_model, check_optimizer, check_units
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.kept import KeptState, Stateful
from echelon.dist.resilient.protection import is_protected, listening
from echelon.dist.resilient.replicas import Replicas
from echelon.dist.resilient.sharded import ShardedState, num_replicas_of
from echelon.dist.resilient.training.replicated import Training
from echelon.dist.resilient.training.sharded import ShardedTraining
from echelon.dist.resilient.training.world import World
from echelon.recorder.continuation import REPLACE

_T = TypeVar("_T")


def run(
    prepare: Callable[[World], Callable[[int], _T]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total: int,
    first: int = 0,
    also: Sequence[Stateful] = (),
    on_commit: Callable[[int, _T], None] | None = None,
    from_checkpoint: Callable[[], int] | None = None,
    num_replicas: Callable[[int], int] | None = None,
) -> None:
    """Train the steps `first` to `total - 1`, and continue if ranks are lost.

    Under `echelon run --on-loss shrink`, the surviving ranks discard the step in which a rank died,
    restore the state from the start of that step, and repeat the step. Their processes are not
    restarted. With gradients that do not depend on the number of ranks
    (`echelon.train.same_bits.SameBits`), the result is bitwise identical to that of a run without
    losses. Under `--on-loss replace`, a new process also replaces each lost rank at the end of a
    step. The new process calls this function like any other rank, receives the state, and only then
    calls `prepare`. Under other launchers or settings, `run` warns and trains without this
    protection.

    Every rank must call `run` after `echelon.dist.init`. Each step ends with a barrier. Each rank
    copies the training state once per step, and the copy takes as much memory as the state itself.
    For a sharded model, each rank stores copies from the last two steps. On several hosts, each
    rank also stores copies of other ranks' shards.

    Args:
        prepare: creates all objects that depend on the current ranks (groups, meshes, `SameBits`),
            and returns a function that computes one step, given the step's number. `prepare` is
            called at the start, and again after each loss and each join, after all earlier groups
            have been closed. The function that it returns must change only the model, the
            optimizer, `also` and the random number generators. It must not use gradients from an
            earlier step, and must not catch CollectiveError.
        model: the model. Every rank must hold the whole model, or `fully_shard` must have sharded
            the model across all ranks of the world, with or without replicas. After each loss and
            each join, a sharded model is sharded again, across the ranks of the new world. Modules
            and parameters stay the same objects. For a pipeline, use `run_pipeline`.
        optimizer: the optimizer of the model's parameters.
        total: the number of the last step, plus one.
        first: the number of the first step.
        also: schedules, averages and other objects whose state the steps change.
        on_commit: called once per step on each rank, with the step's number and result, when a loss
            can no longer undo the step. For a sharded model, this is at the end of a later step, or
            after the last step. The function must not call collectives.
        from_checkpoint: called for a sharded model if all copies of a shard are lost. The function
            loads the newest checkpoint into `model`, `optimizer` and `also`, and returns the number
            of the first step to train. This step and all later steps are trained and committed
            again. Collective.
        num_replicas: for a sharded model, returns the number of its replicas, given the number of
            ranks. The result must divide the number of ranks. None means the highest number, up to
            the number at the start, that divides the number of ranks.

    Raises:
        ValueError: `echelon.dist.init` was not called, `model` can be neither copied nor restored,
            `num_replicas` returned an invalid number, `prepare` sharded a part of the model,
            unsharded state or replicas of a shard differ between ranks, or this process has already
            made a protected call to `run` or `run_pipeline`.
        CollectiveError: a collective failed, and the launcher did not publish a new epoch, because
            too few ranks are left or no rank has died; or all copies of a shard are lost, and
            `from_checkpoint` is None.
        SystemExit: with code 0, in a process that is still waiting to join when the other ranks
            finish.

    Example:
        >>> from echelon.train.same_bits import SameBits
        >>> def prepare(world):
        ...     probes = world.epoch == 0
        ...     same = SameBits(model, optimizer, micro_batches=2, seed=1, probe=probes)
        ...
        ...     def train_step(step):
        ...         loss = same.backward(step, lambda number: loss_fn(model(tokens), targets))
        ...         optimizer.step()
        ...         return loss
        ...
        ...     return train_step
        >>> run(prepare, model, optimizer, total=3, on_commit=lambda step, loss: print(step))
        0
        1
        2
    """
    group = runtime.world()
    check_model(model, group)
    check_optimizer(model, optimizer)
    units = units_of(model)
    if num_replicas is not None and not units:
        raise ValueError("num_replicas= has no effect on a model that is not sharded")
    replicas = Replicas(num_replicas_of(model), num_replicas)
    replicas.check(group.size)
    if not first <= total:
        raise ValueError(f"first must be at most total, got first={first} and total={total}")
    protected = is_protected(group, "run")
    joins = Joins(is_on=on_loss() == REPLACE)

    def prepared(world: World) -> Callable[[int], _T]:
        compute = prepare(world)
        check_units(model, units)
        return compute

    training: Training[_T]
    if units:
        sharded = ShardedState(model, optimizer, also, replicas)
        training = ShardedTraining(
            prepared, sharded, first, total, on_commit, joins, from_checkpoint,
            is_protected=protected,
        )  # fmt: skip
    else:
        kept = KeptState(model, optimizer, also)
        training = Training(prepared, kept, first, total, on_commit, joins, is_protected=protected)
    with contextlib.ExitStack() as stack:
        stack.callback(training.close)
        if protected:
            stack.enter_context(listening(joins))
        training.train(World(group, 0, ()))
