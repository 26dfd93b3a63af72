"""Distribute a model across the ranks of a mesh; every rank starts with the whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel.axes import Axes, axes_of
from echelon.dist.parallel.parallel import Parallel
from echelon.dist.parallel.plan import Plan, matches
from echelon.dist.parallel.stages import copies, cut, find_ties, first_names
from echelon.dist.parallel.tensor.divide import Undivided, divide_model
from echelon.dist.parallel.tensor.gradients import SharedGradients
from echelon.dist.parallel.tensor.styles import Setting
from echelon.dist.pipeline import Pipeline
from echelon.dist.pipeline.execute.stage import LossFn, Stage
from echelon.dist.pipeline.plan.catalog import schedule as schedule_of

_SEED_STEP = 7919  # between the seeds of tensor-parallel ranks that draw their slices' values


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan | None = None,
    *,
    loss_fn: LossFn | None = None,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    num_chunks: int | None = None,
    sequence: bool = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    offload_policy: CPUOffloadPolicy | None = None,
    prefetch: int = 2,
    memory_budget_bytes: int | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> Parallel:
    """Distribute a model and its training across the ranks of a mesh.

        mesh = DeviceMesh((2, 1, 2, 2), ("pp", "replicate", "shard", "tp"))
        parallel = parallelize(model, mesh, loss_fn=loss_fn, num_microbatches=8)
        optimizer = torch.optim.AdamW(parallel.parameters())
        loss = parallel.step(tokens, targets)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()

    The mesh can have any of these axes, in this order: "pp" for the stages of a pipeline;
    "replicate" for identical copies trained on different data; "shard" for `fully_shard`; and "tp"
    for layers that are split by heads and features. Axis "tp" needs the fastest links, so its
    ranks are consecutive. Every rank of the world must call this function with the same arguments
    and an identical model. The model is modified in place. The function blocks until all ranks have
    called it or a group's timeout expires. Initial values are taken from the first rank along each
    axis except "pp".

    Args:
        model: the model, on the host, on a device, or on the meta device.
        mesh: the mesh of ranks to distribute the model over.
        plan: the plan for distributing this kind of model; None means `model.plan()`.
        loss_fn: called with the model's output and the targets; returns the mean loss over the
            targets. None if the model's output is the loss.
        num_microbatches: the number of micro-batches into which a rank's batch is split along
            dim 0, with or without a pipeline. Gradients are averaged over the micro-batches and
            reduced once.
        schedule: the name of the pipeline's schedule.
        num_chunks: the number of pipeline stages per rank.
        sequence: whether to use sequence parallelism: the activations of norms and residuals are
            split evenly by position across the ranks of axis "tp".
        mp_policy: as in `fully_shard`.
        reshard_after_forward: as in `fully_shard`.
        offload_policy: as in `fully_shard`.
        prefetch: as in `fully_shard`.
        memory_budget_bytes: as in `fully_shard`.
        device: for a model on the meta device, as in `fully_shard`.
        init: for a model on the meta device, as in `fully_shard`. Each rank of axis "tp"
            initializes its slices with a different seed.

    Raises:
        ValueError: an argument is invalid, or the model, plan and mesh do not match.
        PlanError: the schedule cannot be executed.
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> mesh = DeviceMesh((2,), ("tp",))  # on each of 2 ranks
        >>> parallel = parallelize(model, mesh, loss_fn=loss_fn)
        >>> optimizer = torch.optim.AdamW(parallel.parameters())
        >>> loss = parallel.step(tokens, targets)
        >>> optimizer.step()
    """
    axes = axes_of(mesh)
    plan = _plan_of(model, plan)
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"num_microbatches must be an integer >= 1, got {num_microbatches!r}")
    if sequence and axes.tensor.size == 1:
        raise ValueError(
            "sequence=True needs at least two ranks on axis tp, along which sequences are split"
        )
    has_stages = axes.stages.size > 1
    if not has_stages and num_chunks not in (None, 1):
        raise ValueError(f"num_chunks={num_chunks} needs at least two ranks on axis pp")
    blocks = [module for _, module, _ in matches(model, plan.blocks)]
    first = first_names(model)
    undivided = Undivided()
    if axes.tensor.size > 1:
        undivided = divide_model(model, plan, Setting(axes.tensor, sequence))
    stages: list[Stage] = []
    if has_stages:
        order = schedule_of(schedule, axes.stages.size, num_microbatches, num_chunks)
        stages = cut(model, plan, order, axes.stages)
    settings: dict[str, Any] = {
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy,
        "prefetch": prefetch,
        "memory_budget_bytes": memory_budget_bytes,
        "device": device,
        "init": init,
    }
    tops = [stage.module for stage in stages] or [model]
    _shard(tops, blocks, axes, settings)
    _make_copies_equal(tops, undivided, axes)
    ties: list[list[str]] = []
    pipeline = None
    if has_stages:
        ties = find_ties(stages, first, axes.stages)
        pipeline = Pipeline(stages, group=axes.stages, schedule=order, loss_fn=loss_fn, ties=ties)
    held = list(dict.fromkeys(parameter for top in tops for parameter in top.parameters()))
    return Parallel(
        axes,
        model if pipeline is None else pipeline.module,
        pipeline,
        SharedGradients(undivided, held, axes.tensor),
        loss_fn=loss_fn,
        num_microbatches=num_microbatches,
        copies=copies(stages, ties),
        names=first,
    )


def _plan_of(model: nn.Module, plan: Plan | None) -> Plan:
    if plan is None:
        make: Any = getattr(model, "plan", None)
        if not callable(make):
            raise ValueError(f"{type(model).__name__} does not have a plan() method: pass plan=")
        plan = make()
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be an echelon.dist.parallel.Plan, got {type(plan).__name__}")
    return plan


def _shard(
    tops: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    axes: Axes,
    settings: dict[str, Any],
) -> None:
    """Shard each block as one unit, and the remaining parameters of each stage as another unit.

    Without a pipeline, the whole model is treated as one stage. On a single data-parallel rank,
    nothing is sharded unless `mp_policy`, `offload_policy` or a model on the meta device requires
    units.
    """
    is_meta = any(parameter.is_meta for top in tops for parameter in top.parameters())
    needs_units = is_meta or settings["mp_policy"] is not None or settings["offload_policy"]
    if axes.data.size == 1 and not needs_units:
        return
    with _own_seed(axes) if is_meta else contextlib.nullcontext():
        for top in tops:
            within = set(top.modules())
            for block in blocks:
                if block in within and block is not top:
                    fully_shard(block, mesh=axes.data, **settings)
            fully_shard(top, mesh=axes.data, **settings)


@contextlib.contextmanager
def _own_seed(axes: Axes) -> Iterator[None]:
    """Within the block, use a different seed on each rank along axis "tp".

    The slices of a parameter are therefore initialized with different values.
    """
    if axes.tensor.size == 1:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed() + _SEED_STEP * axes.tensor.rank)
        yield


def _make_copies_equal(tops: Sequence[nn.Module], undivided: Undivided, axes: Axes) -> None:
    """Broadcast all unsplit parameters from the first rank of axis "tp" to the other ranks."""
    whole = {id(one) for one in (*undivided.partial, *undivided.equal)}
    if axes.tensor.size == 1:
        return
    with torch.no_grad():
        for parameter in dict.fromkeys(one for top in tops for one in top.parameters()):
            if id(parameter) in whole and parameter.numel():
                axes.tensor.broadcast(parameter.detach(), root=0)
