"""Report ranks without a record, and incidents that no other rule explains."""

from __future__ import annotations

import numpy as np

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.timing import arrivals
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list, seconds

_LATE_S = 1.0  # how late a rank must have been for a stall that was over before the snapshot


def find_missing(picture: Picture) -> list[Finding]:
    """Report, as suspects, the ranks that left no readable record."""
    missing = picture.evidence.missing
    if not missing or not picture.evidence.ranks:
        return []
    unreadable = set(picture.evidence.unreadable) >= set(missing)
    left = "has a record that cannot be read" if unreadable else "left no record"
    who = rank_list(missing)
    return [
        Finding(
            cause=Cause.DEAD_PROCESS,
            culprit_ranks=missing,
            confidence=Confidence.POSSIBLE,
            summary=f"{who} {left} although the others did; probably killed",
            evidence=(f"{who}: {left}", f"{rank_list(tuple(picture.evidence.ranks))} left theirs"),
            fallout_ranks=picture.fallout(missing),
            would_settle=(f"the exit status of {who}, or a record of it",),
            next_action=f"Look at how {who} ended, and whether its record was written elsewhere.",
        )
    ]


def find_unknown(picture: Picture) -> list[Finding]:
    """Report an incident that the records do not explain."""
    incident = picture.evidence.incident
    if incident.kind not in ("failure", "stall"):
        return []
    late = _latest_arrival(picture)
    if late is not None and incident.kind == "stall":
        return [late]
    ringless = tuple(rank for rank, facts in picture.evidence.ranks.items() if not facts.has_ring)
    settles = ["a second snapshot a few seconds later", "the stderr of every rank"]
    if ringless:
        settles.insert(0, f"a recording of {rank_list(ringless)}")
    reason = f" ({incident.reason})" if incident.reason else ""
    seen = f"a {incident.kind} was detected{reason}"
    return [
        Finding(
            cause=Cause.UNKNOWN,
            culprit_ranks=(),
            confidence=Confidence.POSSIBLE,
            summary=f"{seen}, but nothing in the records explains it",
            evidence=(f"incident {incident.number}: {incident.kind}{reason}", *_absent(picture)),
            fallout_ranks=tuple(sorted(picture.disturbed)),
            would_settle=tuple(settles),
            next_action="Take another snapshot a few seconds later, and read the ranks' stderr.",
        )
    ]


def _absent(picture: Picture) -> list[str]:
    """Describe which ranks did not send a black box, with one line per reason."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(picture.evidence.incident.absent.items()):
        by_reason.setdefault(why, []).append(rank)
    return [f"{rank_list(ranks)} sent no black box: {why}" for why, ranks in by_reason.items()]


def find_unproven(picture: Picture) -> list[Finding]:
    """Report the ranks that are inside operations if no rank appears to be at fault.

    The operations might be stuck or simply be in flight.
    """
    waiting = tuple(sorted(picture.graph.waiting))
    if picture.streams is None or not waiting:
        return []
    return [
        Finding(
            cause=Cause.UNKNOWN,
            culprit_ranks=(),
            confidence=Confidence.POSSIBLE,
            summary=f"{rank_list(waiting)} inside operations that may be in flight or stuck; "
            "nothing points to a fault, and nothing proves that the job makes progress, as a "
            "second set of dumps, some seconds later, would",
            evidence=tuple(str(wait) for wait in picture.graph.waits[:4]),
            fallout_ranks=waiting,
            would_settle=("a second set of dumps some seconds later",),
            next_action="Dump once more, some seconds later, and compare.",
            info=True,
        )
    ]


def _latest_arrival(picture: Picture) -> Finding | None:
    """Describe the late arrival that cost the most time; it might explain a past stall."""
    worst: tuple[int, int, str, int, str] | None = None
    for lanes in picture.lanes:
        found = arrivals(lanes)
        if found is None:
            continue
        place = int(np.argmax(found.cost_ns))
        member = int(found.last[place])
        row = lanes.row(member, int(found.columns[place]))
        call = picture.evidence.call(row).operation
        sequence = int(lanes.sequences[found.columns[place]])
        this = (int(found.cost_ns[place]), int(found.members[member]), lanes.name, sequence, call)
        worst = this if worst is None else max(worst, this)
    if worst is None or worst[0] < _LATE_S * 1e9:
        return None
    cost_ns, rank, group, sequence, operation = worst
    late = seconds(cost_ns / 1e9)
    return Finding(
        cause=Cause.UNKNOWN,
        culprit_ranks=(rank,),
        confidence=Confidence.POSSIBLE,
        group=group,
        operation=operation,
        sequence=sequence,
        summary=f"rank {rank} reached {operation} #{sequence} of group '{group}' {late} after "
        f"all others; the job continued before the snapshot could show why",
        evidence=(f"rank {rank} was {late} late, and all ranks completed the {operation}",),
        would_settle=(f"a snapshot while rank {rank} is late",),
        next_action=f"Look at what rank {rank} did before that call; mark it with a span.",
    )
