"""Rank the layouts that fit in memory by estimated step time, and quantify the uncertainty.

The machine's figures are known only within bounds. Therefore, many possible machines are sampled,
and every layout's step time is estimated on each of them. Factors that all layouts share, such as
slow processors, do not change the order of the layouts. In addition, every estimate is multiplied
by an independent random error, as large as the measured error of the estimates (docs/planner.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.planner.layout import Job, Layout, layouts
from echelon.planner.machine import Machine
from echelon.planner.memory import Memory, memory
from echelon.planner.model import Model
from echelon.planner.step_time import StepTime, step_time

NUM_DRAWS = 200
_OWN_ERROR = 0.12  # relative to a layout's time, one standard deviation
_TIE = 0.2  # a layout that is faster than the first in this share of draws ties with it
RESERVE = 0.1  # share of the memory, for allocators
_MAX_COMPARED = 40
_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that fits in memory, with its estimated memory use and step time.

    Attributes:
        step_s: the low, likely and high estimates of a step's duration; 90 % of the random draws
            of the machine's figures give a duration between low and high.
        wins: the fraction of the draws in which this layout is the fastest.
        is_tie: whether the estimates cannot distinguish this layout from the fastest layout.
    """

    layout: Layout
    memory: Memory
    time: StepTime
    step_s: tuple[float, float, float]
    wins: float
    is_tie: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of `plan`.

    Attributes:
        candidates: the layouts that fit in memory, fastest first; one for each combination of
            mesh and schedule.
        num_layouts: the number of layouts that were examined.
        num_fitting: the number of layouts that fit.
        smallest: the layout that needs the least memory of all layouts that do not fit; None if all
            layouts fit.
    """

    candidates: tuple[Candidate, ...]
    num_layouts: int
    num_fitting: int
    smallest: tuple[Layout, Memory] | None


def plan(model: Model, job: Job, machine: Machine, memory_bytes: float) -> Outcome:
    """Return the layouts of a job that fit in memory, fastest first.

    Args:
        memory_bytes: the memory of one rank in bytes; a tenth of it is left free.

    Raises:
        ValueError: the context is longer than the model's learned position embedding, or no layout
            splits the ranks, the batch and the model evenly.
    """
    if model.learns_positions and job.context > model.context:
        raise ValueError(f"context {job.context} exceeds the model's {model.context} positions")
    every = [(layout, memory(model, layout, job)) for layout in layouts(model, job)]
    if not every:
        raise ValueError(
            f"no layout of {job.ranks} ranks can evenly divide a batch of {job.batch}, the "
            f"model's {model.layers} layers and its {model.kv_heads} kv_heads"
        )
    room = memory_bytes * (1 - RESERVE)
    fitting = [pair for pair in every if pair[1].total <= room]
    beyond = [pair for pair in every if pair[1].total > room]
    best = _best_of_each_mesh(model, job, machine, fitting)
    return Outcome(
        candidates=_compared(model, job, machine, best[:_MAX_COMPARED]),
        num_layouts=len(every),
        num_fitting=len(fitting),
        smallest=min(beyond, key=lambda pair: pair[1].total) if beyond else None,
    )


def _best_of_each_mesh(
    model: Model, job: Job, machine: Machine, fitting: Sequence[tuple[Layout, Memory]]
) -> list[tuple[Layout, Memory]]:
    """Return the fastest layout for each combination of mesh and schedule, fastest first."""
    best: dict[object, tuple[float, Layout, Memory]] = {}
    for layout, needed in fitting:
        key = (layout.pp, layout.replicate, layout.shard, layout.tp, layout.schedule)
        took = step_time(model, layout, job, machine).total
        # Of equally fast ones, the one with less memory.
        if key not in best or (took, needed.total) < (best[key][0], best[key][2].total):
            best[key] = (took, layout, needed)
    return [(layout, needed) for _, layout, needed in sorted(best.values(), key=lambda b: b[0])]


def _compared(
    model: Model, job: Job, machine: Machine, best: Sequence[tuple[Layout, Memory]]
) -> tuple[Candidate, ...]:
    """Estimate step times on many sampled machines; sort the layouts by their likely step time."""
    if not best:
        return ()
    chance = random.Random(_SEED)
    draws = [_times(model, job, machine.drawn(chance), best, chance) for _ in range(NUM_DRAWS)]
    first = [min(range(len(best)), key=draw.__getitem__) for draw in draws]
    likely = [step_time(model, layout, job, machine) for layout, _ in best]
    order = sorted(range(len(best)), key=lambda i: likely[i].total)
    leader = order[0]
    found = []
    for i in order:
        own = sorted(draw[i] for draw in draws)
        faster = sum(draw[i] < draw[leader] for draw in draws) / NUM_DRAWS
        found.append(
            Candidate(
                layout=best[i][0],
                memory=best[i][1],
                time=likely[i],
                step_s=(own[NUM_DRAWS // 20], likely[i].total, own[-NUM_DRAWS // 20]),
                wins=first.count(i) / NUM_DRAWS,
                is_tie=i != leader and faster >= _TIE,
            )
        )
    return tuple(found)


def _times(
    model: Model,
    job: Job,
    machine: Machine,
    best: Sequence[tuple[Layout, Memory]],
    chance: random.Random,
) -> list[float]:
    return [
        step_time(model, layout, job, machine).total * chance.lognormvariate(0.0, _OWN_ERROR)
        for layout, _ in best
    ]
