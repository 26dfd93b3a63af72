"""Collect the facts about a failed attempt from its world, its incident and its verdict.

If there is no verdict yet, the facts come from the first rank that failed: its exit code, and the
error in its black box.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.policy.failure import DEAD, UNKNOWN, Failure
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Ended, Incident

if TYPE_CHECKING:
    from echelon.launcher.incident.circumstances import Circumstances

_PLACE = re.compile(r"[\w.<>-]{1,100}:\d{1,7} in [\w.<>]{1,100}")
_EPOCH = re.compile(r"^world\.\d+$")  # the world's group after losses: each epoch has its own name
_RAISES = ("exception", "out_of_memory", "device_stuck")
_MAX_SAID = 200
_MAX_SITE = 300


def incident_of(
    world: World, incidents: list[Incident], ended_by: decide.EndedBy
) -> Incident | None:
    """Return the incident of the stall or failure that ended a world, or None."""
    kind = "stall" if ended_by is decide.EndedBy.STALL else "failure"
    mine = [one for one in incidents if one.attempt == world.number and one.kind == kind]
    lasting = [one for one in mine if not one.recovered]
    return next(iter(reversed(lasting or mine)), None)


def failure_of(world: World, incident: Incident | None) -> Failure:
    """Describe the failure that ended an attempt, using the verdict on `incident`, if any."""
    verdict = None if incident is None else incident.verdict
    if verdict is not None:
        assert incident is not None
        return _by_verdict(world, verdict, incident.circumstances or {})
    return _by_ends(world, incident)


def _by_verdict(world: World, verdict: Mapping[str, Any], around: Mapping[str, Any]) -> Failure:
    cause, summary = str(verdict["cause"]), str(verdict.get("summary", ""))
    culprits = tuple(rank for rank in verdict["culprit_ranks"] if rank < world.size)
    ended = [world.ended[rank] for rank in culprits if rank in world.ended]
    site = str(around.get("site", "")) if cause in _RAISES else ""
    if cause == DEAD:
        site = "; ".join(sorted({_how(one) for one in ended}))
    if not site:
        place = _PLACE.search(summary)
        group = _EPOCH.sub("world", str(verdict.get("group") or ""))
        where = (place[0] if place else "", group, verdict.get("operation"))
        site = " ".join(str(part) for part in where if part)
    return _failure(
        world,
        culprits,
        cause=cause,
        is_likely=verdict.get("confidence") in ("likely", "certain"),
        is_certain=verdict.get("confidence") == "certain",
        said=_first_clause(summary),
        site=site[:_MAX_SITE],
        last_step=int(around.get("last_step", -1)),
        is_killed=any(_is_killed(one) for one in ended),
        is_outside=bool(around.get("is_outside")),
        owns_memory=around.get("owns_memory"),
        saving_s=float(around.get("saving_s", 0.0)),
        idle_ranks=tuple(around.get("idle_ranks", ())),
    )


def _by_ends(world: World, incident: Incident | None) -> Failure:
    ended = (one for one in world.ended.values() if one.code != 0 and not one.epoch)
    failed = sorted(ended, key=lambda one: one.order)
    if not failed:
        return _failure(world, (), said="" if incident is None else incident.reason)
    first = failed[0]
    is_killed = _is_killed(first)
    around = _look(incident, [one.rank for one in (failed[:1] if is_killed else failed)])
    if is_killed or around is None or not around.cause:
        return _failure(
            world,
            (first.rank,),
            cause=DEAD if is_killed else UNKNOWN,
            site=_how(first),
            said=f"rank {first.rank} {_how(first)}",
            last_step=_last_step(world, incident, first.rank, around),
            is_killed=is_killed,
        )
    return _failure(
        world,
        (around.rank,),
        cause=around.cause,
        site=around.site,
        said=f"rank {around.rank} raised {around.site}",
        last_step=around.last_step,
        is_outside=around.is_outside,
        owns_memory=around.owns_memory,
    )


def _last_step(
    world: World, incident: Incident | None, rank: int, around: Circumstances | None
) -> int:
    """Return the last step that a rank recorded; -1 if unknown.

    If the rank left no record, the step comes from another rank, preferably one that failed because
    of its own error.
    """
    if around is None:
        around = _look(incident, [other for other in range(world.size) if other != rank])
    return -1 if around is None else around.last_step


def _look(incident: Incident | None, ranks: Sequence[int]) -> Circumstances | None:
    """Return the facts about the first of the given ranks that failed because of its own error.

    If no such rank is found, return the facts about the first rank with a readable dump. Return
    None if there is no incident or no readable dump.
    """
    if incident is None:
        return None
    from echelon.launcher.incident.circumstances import circumstances  # imported only if needed

    return circumstances(incident.folder, ranks)


def _failure(world: World, culprits: tuple[int, ...], **known: Any) -> Failure:
    nodes = tuple(dict.fromkeys(world.node_of(rank) for rank in culprits))
    return Failure(
        attempt=world.number,
        culprit_ranks=culprits,
        nodes=nodes,
        hosts=tuple(world.hosts[node] for node in nodes),
        **known,
    )


def _is_killed(ended: Ended) -> bool:
    return not ended.stopped and (ended.code is None or ended.code < 0)


def _how(ended: Ended) -> str:
    return "was lost with its node" if ended.code is None else decide.describe_code(ended.code)


def _first_clause(summary: str) -> str:
    return summary.partition("; ")[0][:_MAX_SAID]
