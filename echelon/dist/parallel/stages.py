"""Split a model into this rank's stages, and find the parameters that stages share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from echelon.dist.group import ProcessGroup
from echelon.dist.parallel.plan import Plan
from echelon.dist.pipeline.execute.stage import Stage
from echelon.dist.pipeline.plan.plan import Plan as Schedule


def cut(model: nn.Module, plan: Plan, schedule: Schedule, group: ProcessGroup) -> list[Stage]:
    """Return the stages of a model that the schedule assigns to this rank.

    Raises:
        ValueError: the plan does not define stages, or the model cannot be split into the required
            number of stages.
    """
    if plan.stages is None:
        raise ValueError(
            f"the mesh has {group.size} ranks on axis pp, but the plan does not define how to "
            f"split {type(model).__name__} into stages: set plan.stages"
        )
    num = schedule.num_stages
    return [
        Stage(plan.stages(model, index, num), index=index, num_stages=num)
        for index in schedule.stages_of(group.rank)
    ]


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name to the parameter's first name. Tied parameters have several names."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def find_ties(
    stages: Sequence[Stage], first: dict[str, str], group: ProcessGroup
) -> list[list[str]]:
    """Return the parameters that several stages share, in the format of `Pipeline`'s `ties`.

    Collective.

    Args:
        stages: this rank's stages.
        first: the result of `first_names` for the whole model, the same on all ranks.
        group: the pipeline's ranks.

    Raises:
        CollectiveError: a rank was lost or did not join.
    """
    mine = [
        [stage.index, [name for name, _ in stage.module.named_parameters(remove_duplicate=False)]]
        for stage in stages
    ]
    holders: dict[str, dict[int, str]] = {}
    for one in group.all_gather_object(mine):
        for index, names in one:
            for name in names:
                holders.setdefault(first.get(name, name), {}).setdefault(index, name)
    return [
        [f"{index}:{name}" for index, name in sorted(held.items())]
        for _, held in sorted(holders.items())
        if len(held) > 1
    ]


def copies(stages: Sequence[Stage], ties: Sequence[Sequence[str]]) -> list[nn.Parameter]:
    """Return this rank's copies of tied parameters that a gradient norm must skip.

    A norm counts only the copy in the first stage that holds the parameter.
    """
    by_index = {
        stage.index: dict(stage.module.named_parameters(remove_duplicate=False)) for stage in stages
    }
    found: list[nn.Parameter] = []
    for tie in ties:
        places = [(int(index), name) for index, _, name in (one.partition(":") for one in tie)]
        here = [by_index[index][name] for index, name in places[1:] if index in by_index]
        first, name = places[0]
        counted = by_index[first][name] if first in by_index else None
        found += [parameter for parameter in here if parameter is not counted]
    return list(dict.fromkeys(found))
