"""What a pipeline's schedule costs and keeps, from its simulation; remembered, since it recurs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.planner.layout import Layout
from echelon.planner.model import Model


@dataclass(frozen=True, slots=True)
class Stages:
    """Where the model's blocks lie.

    Attributes:
        rank_of_stage: which rank of axis "pp" holds each stage.
        blocks: of each stage.
    """

    rank_of_stage: tuple[int, ...]
    blocks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Return a rank's stages."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]


@dataclass(frozen=True, slots=True)
class Course:
    """How a schedule runs.

    Attributes:
        makespan: of a step, in the unit of the costs.
        busiest: the time that the rank with the most work computes.
        peaks: by rank, micro-batches whose activations it holds at its peak, of each of its stages
            on average.
    """

    makespan: float
    busiest: float
    peaks: tuple[int, ...]


def stages_of(layout: Layout, model: Model) -> Stages:
    """Return how `parallelize` cuts a model: evenly, the first stages have one block more."""
    number = layout.pp * layout.chunks
    least, more = divmod(model.layers, number)
    blocks = tuple(least + (stage < more) for stage in range(number))
    down = list(range(layout.pp))
    is_v = layout.schedule == "zbv"
    owners = down + down[::-1] if is_v else down * layout.chunks
    return Stages(tuple(owners), blocks)


@lru_cache(maxsize=4096)
def course(
    schedule: str,
    pp: int,
    microbatches: int,
    chunks: int,
    forward: tuple[float, ...],
    backward: float,
) -> Course:
    """Simulate a schedule.

    Args:
        schedule, pp, microbatches, chunks: which.
        forward: cost of one micro-batch in each stage.
        backward: of it, as a multiple of the forward: 2, or 3 with recomputation.
    """
    from echelon.dist.pipeline.plan.catalogue import schedule as make
    from echelon.dist.pipeline.simulate.costs import Costs
    from echelon.dist.pipeline.simulate.simulator import simulate

    plan = make(schedule, pp, microbatches, chunks if chunks > 1 else None)
    costs = Costs(
        forward=forward,
        input_grad=tuple((backward - 1) * cost for cost in forward),
        weight_grad=forward,
    )
    done = simulate(plan, costs=costs)
    busy = [sum(slot.end - slot.start for slot in row) for row in done.slots]
    return Course(done.makespan, max(busy), tuple(done.peak_activations))
