"""Detect a rank whose device keeps other ranks waiting."""

from __future__ import annotations

from echelon.analysis.evidence.matching.waits import Wait
from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.streams.streams import ROOTED
from echelon.analysis.finding import Cause, Confidence, rank_list
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.analysis.rules.one_rank.signals import STALE_HEARTBEAT_S, heartbeat_age_s


def read_device(picture: Picture, facts: RankEvidence) -> Reading | None:
    """Detect a rank that is stuck in an operation on a stalled device."""
    if facts.host.alive and heartbeat_age_s(facts) >= STALE_HEARTBEAT_S:
        return None  # Python is not running, and it is what marks operations as completed
    rank = facts.rank
    mine = [wait for wait in picture.graph.waits if rank in wait.waiting]
    wait = next((wait for wait in mine if wait.completed and not wait.absent), None)
    if wait is not None:
        # The root of a reduce is pending too, because it waits for the rank whose device has
        # stopped.
        is_open = wait.operation in ROOTED and len(wait.waiting) > 1
        which = (f"which of {rank_list(wait.waiting)} is the root and is waiting for the others",)
        return Reading(
            cause=Cause.DEVICE_STUCK,
            confidence=Confidence.POSSIBLE if is_open else Confidence.LIKELY,
            words=f"is still inside {wait}, which {rank_list(wait.completed)} completed",
            evidence=(
                f"rank {rank}: {wait} of group '{wait.group}' is pending; its peers completed it",
            ),
            would_settle=(
                f"rank {rank}'s device errors and an event query",
                *(which if is_open else ()),
            ),
        )
    wait = next((wait for wait in mine if rank in never_started(picture, wait)), None)
    if wait is None:
        return None
    started = rank_list([other for other in wait.waiting if other not in wait.created])
    return Reading(
        cause=Cause.DEVICE_STUCK,
        confidence=Confidence.LIKELY,
        words=f"has called {wait}, and its device never started it; {started} did",
        evidence=(f"rank {rank}: {wait} of group '{wait.group}' is scheduled, not started",),
        would_settle=(f"rank {rank}'s device errors and an event query",),
    )


def never_started(picture: Picture, wait: Wait) -> tuple[int, ...]:
    """Return the minority of ranks whose devices have not started an operation.

    The other ranks' devices are already running this operation. Ranks on which the operation is
    still queued behind another operation are omitted.
    """
    if wait.absent or wait.completed or wait.is_p2p or 2 * len(wait.created) >= len(wait.waiting):
        return ()
    return tuple(r for r in wait.created if picture.heads.get(r, (0, -1))[1] == wait.sequence)
