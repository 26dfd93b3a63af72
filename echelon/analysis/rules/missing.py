"""What remains when nothing waits: ranks without a record, and trouble without an explanation."""

from __future__ import annotations

from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.picture import Picture


def find_missing(picture: Picture) -> list[Finding]:
    """Suspect the ranks that left no readable record."""
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
            summary=f"{who} {left}, the others did: a process that is gone cannot write one",
            evidence=(f"{who}: {left}", f"{rank_list(tuple(picture.evidence.ranks))} left theirs"),
            fallout_ranks=picture.fallout(missing),
            would_settle=(f"the exit status of {who}, or a record of it",),
            next_action=f"Look at how {who} ended, and whether its record was written elsewhere.",
        )
    ]


def find_unknown(picture: Picture) -> list[Finding]:
    """Say plainly that there was trouble and that nothing recorded explains it."""
    incident = picture.evidence.incident
    if incident.kind not in ("failure", "stall"):
        return []
    ringless = tuple(rank for rank, facts in picture.evidence.ranks.items() if not facts.has_ring)
    settles = ["a second snapshot a few seconds later", "the stderr of every rank"]
    if ringless:
        settles.insert(0, f"a recording of {rank_list(ringless)}")
    reason = f" ({incident.reason})" if incident.reason else ""
    return [
        Finding(
            cause=Cause.UNKNOWN,
            culprit_ranks=(),
            confidence=Confidence.POSSIBLE,
            summary=f"a {incident.kind} was seen{reason}, and nothing recorded explains it",
            evidence=(f"incident {incident.number}: {incident.kind}{reason}",),
            fallout_ranks=tuple(sorted(picture.disturbed)),
            would_settle=tuple(settles),
            next_action="Take another snapshot a few seconds later, and read the ranks' stderr.",
        )
    ]
