"""Check a pipeline's preconditions: a valid plan, the right stages, and agreement among ranks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline.execute.partition import shared_with
from echelon.dist.pipeline.execute.stage import Stage
from echelon.dist.pipeline.execute.ties import Ties
from echelon.dist.pipeline.plan.catalog import schedule as schedule_of
from echelon.dist.pipeline.plan.check import check_plan
from echelon.dist.pipeline.plan.plan import Plan


def plan_of(
    schedule: str | Path | Plan, num_ranks: int, num_microbatches: int | None, num_chunks: int
) -> Plan:
    """Return the plan that `schedule` specifies, after checking the plan.

    Raises:
        ValueError: the plan does not match the number of ranks or micro-batches, or the named
            schedule is not defined for the given numbers of ranks, micro-batches and chunks.
        PlanError: the plan cannot be executed.
    """
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
            f"num_microbatches must be {plan.num_microbatches} for plan {plan.name!r}, got "
            f"{num_microbatches}"
        )
    if plan.num_ranks != num_ranks:
        raise ValueError(
            f"plan {plan.name!r} is for {plan.num_ranks} ranks, but the group has {num_ranks}"
        )
    return plan


def check_stages(stages: Sequence[Stage], plan: Plan, rank: int) -> None:
    """Check that a rank has exactly the stages that the plan assigns to the rank.

    Raises:
        ValueError: the rank's stages do not match the plan.
    """
    indices, expected = tuple(stage.index for stage in stages), plan.stages_of(rank)
    if indices != expected:
        raise ValueError(
            f"plan {plan.name!r} puts stages {list(expected)} on rank {rank} of the group, but "
            f"this rank was given stages {list(indices)}"
        )
    wrong = [stage for stage in stages if stage.num_stages != plan.num_stages]
    if wrong:
        raise ValueError(
            f"{wrong[0]} does not match plan {plan.name!r}, which has {plan.num_stages} stages"
        )


def check_shared(stages: Sequence[Stage], plan: Plan, ties: Sequence[Sequence[str]]) -> None:
    """Check that parameters used on several ranks are tied.

    Raises:
        ValueError: a parameter that is used on several ranks is not tied.
    """
    tied = [set(tie) for tie in ties]
    for stage in stages:
        for places in shared_with(stage.module):
            holders: dict[int, set[str]] = {}
            for place in places:
                holders.setdefault(plan.rank_of_stage[int(place.split(":")[0])], set()).add(place)
            is_tied = any(all(tie & names for names in holders.values()) for tie in tied)
            if len(holders) > 1 and not is_tied:
                one_each = [min(names) for _, names in sorted(holders.items())]
                raise ValueError(
                    f"stages share one parameter ({', '.join(places)}) on ranks "
                    f"{sorted(holders)} of the group, but it is not tied: pass ties=[{one_each}]"
                )


def agree(
    group: ProcessGroup,
    plan: Plan,
    ties: Sequence[Sequence[str]],
    mine: Ties,
    device: torch.device,
) -> str:
    """Check that all ranks have the same plan and ties; return a name for the pipeline.

    Collective. The name is random, so that the pipeline never accepts messages from an earlier,
    failed pipeline.

    Raises:
        ValueError: plans or ties differ, stages are on devices of different kinds, or a tied
            parameter is frozen in only some stages.
    """
    text = plan.to_csv() + repr([sorted(tie) for tie in ties])
    facts = [plan.name, plan.num_microbatches, crc32(text.encode())]
    every = group.all_gather_object([facts, mine.trained(), uuid.uuid4().hex[:12], device.type])
    for rank, (theirs, _, _, kind) in enumerate(every):
        if theirs != facts:
            raise ValueError(
                "schedule, number of micro-batches, plan and ties must be equal on all ranks: "
                f"rank {group.ranks[rank]} has schedule {theirs[0]!r} with {theirs[1]} "
                f"micro-batches, and this rank has {facts[0]!r} with {facts[1]}"
            )
        if kind != device.type:
            raise ValueError(
                f"the stages of rank {group.ranks[rank]} are on {kind}, but this rank's are on "
                f"{device.type}. A rank whose stages have neither parameters nor buffers "
                "counts as being on cpu: give one of its stages a buffer"
            )
    for number, tie in enumerate(ties):
        trained = {name: flag for _, flags, *_ in every for name, flag in flags[number]}
        if len(set(trained.values())) > 1:
            frozen = ", ".join(sorted(name for name, flag in trained.items() if not flag))
            raise ValueError(
                f"ties: requires_grad must be equal for all parameters in {list(tie)}, because "
                f"the copies would otherwise diverge; it is False for {frozen}"
            )
    return f"pipeline/{every[0][2]}"
