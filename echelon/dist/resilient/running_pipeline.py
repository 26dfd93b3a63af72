"""Train a pipeline; when a rank is lost, the survivors rebuild the pipeline and continue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from echelon.dist import runtime
from echelon.dist.membership.environment import on_loss
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.protection import is_protected, listening
from echelon.dist.resilient.stages.setup import PipelineSetup
from echelon.dist.resilient.training.staged import StagedTraining
from echelon.dist.resilient.training.world import World
from echelon.recorder.continuation import REPLACE

_T = TypeVar("_T")


def run_pipeline(
    build: Callable[[World], PipelineSetup[_T]],
    *,
    total: int,
    first: int = 0,
    on_commit: Callable[[int, _T], None] | None = None,
    from_checkpoint: Callable[[PipelineSetup[_T]], int] | None = None,
) -> PipelineSetup[_T]:
    """Train a pipeline's steps `first` to `total - 1`, and continue if ranks are lost.

    Under `echelon run --on-loss shrink`, the surviving ranks discard the step in which a rank died,
    build a pipeline for the remaining ranks, restore the state from the start of that step, and
    repeat the step. Their processes are not restarted. With gradients that do not depend on the
    layout (`echelon.train.same_bits.SameBitsPipeline`), the result is bitwise identical to that of
    a run without losses. Under `--on-loss replace`, a new process also replaces each lost rank at
    the end of a step. The new process calls this function like any other rank, and builds its
    stages when the other ranks rebuild theirs. Under other launchers or settings, `run_pipeline`
    warns and trains without this protection.

    Every rank must call `run_pipeline` after `echelon.dist.init`. Each step ends with a barrier.
    Each rank stores copies of the last two states of its stages. On several hosts, each rank also
    stores copies of other ranks' stages.

    Args:
        build: creates all training objects: groups, stages, pipeline, optimizer, schedules. It is
            called at the start, and again after each loss and each join, after all earlier groups
            have been closed. In every world, the stages of all ranks must form the same whole
            model, with the same names (see `echelon.dist.pipeline.split`), whether they are
            replicated or sharded. The stages' initial values matter only at the start. In later
            worlds, the parameters, buffers, optimizer state and settings, `also` and the RNG states
            are restored.
        total: the number of the last step, plus one.
        first: the number of the first step.
        on_commit: called once per step on each rank, with the step's number and result, when a loss
            can no longer undo the step. This is at the end of a later step, or after the last step.
            The function must not call collectives.
        from_checkpoint: called if all copies of a stage are lost, with the objects that `build`
            returned for the remaining ranks. The function loads the newest checkpoint into these
            objects, and returns the number of the first step to train. This step and all later
            steps are trained and committed again. Collective.

    Returns:
        The result of `build` for the last world, with the trained pipeline.

    Raises:
        ValueError: `echelon.dist.init` was not called, `build` returned objects that cannot be
            restored or that do not form the same whole model as before, state that several ranks
            hold differs between them, or a protected call was already made in this process.
        CollectiveError: a collective failed, and the launcher did not publish a new epoch, because
            too few ranks are left or no rank has died; or all copies of a stage are lost, and
            `from_checkpoint` is None.
        SystemExit: with code 0, in a process that is still waiting to join when the other ranks
            finish.

    Example:
        >>> from echelon.dist.canonical import even_runs
        >>> from echelon.train.same_bits import SameBitsPipeline
        >>> def build(world):
        ...     size = world.group.size
        ...     depth = 2 if size % 2 == 0 else 1  # stages; the other axis has their replicas
        ...     mesh = DeviceMesh((depth, size // depth), ("pp", "dp"))
        ...     pp, dp = mesh.group("pp"), mesh.group("dp")
        ...     torch.manual_seed(0)
        ...     layers = [nn.Linear(8, 8) for _ in range(4)]
        ...     stage = Stage(split(layers, depth)[pp.rank], index=pp.rank, num_stages=depth)
        ...     run = even_runs(4, dp.size)[dp.rank]
        ...     pipe = Pipeline([stage], group=pp, replicas=dp, num_microbatches=len(run),
        ...                     loss_fn=nn.MSELoss())
        ...     optimizer = torch.optim.AdamW(pipe.parameters())
        ...     probes = world.epoch == 0
        ...     same = SameBitsPipeline(pipe, optimizer, micro_batches=4, probe=probes)
        ...
        ...     def train_step(step):
        ...         loss = same.backward(step, lambda number: (torch.ones(2, 8), torch.zeros(2, 8)))
        ...         optimizer.step()
        ...         return loss
        ...
        ...     return PipelineSetup(pipe, optimizer, train_step)
        >>> setup = run_pipeline(build, total=3, on_commit=lambda step, loss: print(step))
        0
        1
        2
    """
    group = runtime.world()
    if not first <= total:
        raise ValueError(f"first must be at most total, got first={first} and total={total}")
    protected = is_protected(group, "run_pipeline")
    joins = Joins(is_on=on_loss() == REPLACE)
    training = StagedTraining(
        build, first, total, on_commit, joins, from_checkpoint, is_protected=protected
    )
    with contextlib.ExitStack() as stack:
        stack.callback(training.close)
        if protected:
            stack.enter_context(listening(joins))
        training.train(World(group, 0, ()))
    return training.setup
