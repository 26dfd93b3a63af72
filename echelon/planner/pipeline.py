"""Simulate pipeline schedules to estimate their cost and memory use, and cache the results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.planner.layout import Layout
from echelon.planner.model import Model


@dataclass(frozen=True, slots=True)
class Stages:
    """The distribution of the model's blocks across stages, and of stages across ranks.

    Attributes:
        rank_of_stage: for each stage, the rank on axis "pp" that holds the stage.
        blocks: the number of blocks in each stage.
    """

    rank_of_stage: tuple[int, ...]
    blocks: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        return [stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank]


@dataclass(frozen=True, slots=True)
class Course:
    """The result of simulating a schedule.

    Attributes:
        makespan: the duration of a step, in the same unit as the costs that were simulated.
        busiest: the compute time of the rank with the most work.
        peaks: for each rank, the peak number of (stage, micro-batch) pairs whose activations the
            rank holds at once.
    """

    makespan: float
    busiest: float
    peaks: tuple[int, ...]


def stages_of(layout: Layout, model: Model) -> Stages:
    """Return the stages into which `parallelize` splits a model.

    Blocks are split evenly across stages. Leftover blocks go to the first stages.
    """
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
    """Simulate one step of a schedule.

    Args:
        schedule: the schedule's name.
        pp: the number of ranks.
        microbatches: the number of micro-batches.
        chunks: the number of stages per rank.
        forward: the cost of one micro-batch's forward pass in each stage.
        backward: the cost of a backward pass relative to a forward pass: 2, or 3 with
            recomputation.
    """
    from echelon.dist.pipeline.plan.catalog import schedule as make
    from echelon.dist.pipeline.simulation.costs import Costs
    from echelon.dist.pipeline.simulation.simulator import simulate

    plan = make(schedule, pp, microbatches, chunks if chunks > 1 else None)
    costs = Costs(
        forward=forward,
        input_grad=tuple((backward - 1) * cost for cost in forward),
        weight_grad=forward,
    )
    done = simulate(plan, costs=costs)
    busy = [sum(slot.end - slot.start for slot in row) for row in done.slots]
    return Course(done.makespan, max(busy), tuple(done.peak_activations))
