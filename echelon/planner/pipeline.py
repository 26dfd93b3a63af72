"""Cost and memory of a pipeline's schedule, from a cached simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.planner.layout import Layout
from echelon.planner.model import Model


@dataclass(frozen=True, slots=True)
class Stages:
    """The distribution of the model's blocks over stages.

    Attributes:
        rank_of_stage: the rank of axis "pp" that holds each stage.
        blocks: number of blocks of each stage.
    """

    rank_of_stage: tuple[int, ...]
    blocks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Return a rank's stages."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]


@dataclass(frozen=True, slots=True)
class Course:
    """The result of simulating a schedule.

    Attributes:
        makespan: of a step, in the unit of the costs.
        busiest: the compute time of the rank with the most work.
        peaks: by rank, the micro-batches whose activations it holds at its peak, averaged over its
            stages.
    """

    makespan: float
    busiest: float
    peaks: tuple[int, ...]


def stages_of(layout: Layout, model: Model) -> Stages:
    """Return how `parallelize` divides a model: evenly, the first stages have one block more."""
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
        schedule, pp, microbatches, chunks: the schedule and its sizes.
        forward: cost of one micro-batch in each stage.
        backward: cost as a multiple of the forward: 2, or 3 with recomputation.
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
