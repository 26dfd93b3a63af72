"""Detect a kernel that has not started although it is first in its rank's queue.

If the other members' kernels are already running, the rank is waiting for its own device rather
than for its peers. The rule needs recorded start times.
"""

from __future__ import annotations

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.evidence.streams.streams import Head, Streams
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.recorder.format.schema import State


def find_unstarted(picture: Picture) -> list[Finding]:
    """Report the ranks whose kernels have not started although their peers' kernels are running."""
    streams = picture.streams
    if streams is None or not streams.has_starts or not picture.graph.waits:
        return []
    late = {rank: head for rank, head in streams.heads.items() if head.state == State.CREATED}
    proven = {rank: head for rank, head in late.items() if _peers_started(streams, head)}
    if not proven or len(proven) == len(streams.heads):
        return []
    return [_describe(picture, streams, proven)]


def _peers_started(streams: Streams, head: Head) -> bool:
    """Return whether all other members have started their kernels for the same operation."""
    others = [rank for rank in _members(streams, head) if rank != head.rank]
    there = [streams.heads.get(rank) for rank in others]
    if head.is_message:
        return bool(there) and all(one is not None and one.state == State.STARTED for one in there)
    place = (head.group, head.sequence)
    running = [
        rank
        for rank, one in zip(others, there, strict=True)
        if one is not None and (one.group, one.sequence) == place and one.state == State.STARTED
    ]
    rest = [rank for rank in others if rank not in running]
    if rest and not (running and streams.is_rooted(head)):
        return False
    # The senders of a reduce or gather finish early; its root waits for the last one.
    return bool(running) and all(streams.has_completed(rank, place) for rank in rest)


def _members(streams: Streams, head: Head) -> tuple[int, ...]:
    if not head.is_message:
        return streams.evidence.groups[head.group].ranks
    found = [streams.message(head.rank, row) for row in head.rows]
    sides = [streams.counterpart(one) for one in found if one is not None]
    if len(sides) < len(head.rows) or None in sides:
        return ()
    return tuple(one.rank for one in sides if one is not None)


def _describe(picture: Picture, streams: Streams, late: dict[int, Head]) -> Finding:
    evidence = picture.evidence
    ranks = tuple(sorted(late))
    head = late[ranks[0]]
    row = evidence.ranks[head.rank].rows[head.rows[0]]
    call, group = evidence.call(row), evidence.groups[head.group].name
    name = call.operation if head.is_message else f"{call.operation} #{head.sequence}"
    site = short_site(evidence.site(row))
    at = f" ({site})" if site else ""
    others = tuple(
        rank
        for rank in _members(streams, head)
        if (one := streams.heads.get(rank)) is not None
        and (one.group, one.sequence) == (head.group, head.sequence)
        and rank not in late
    )
    verb = "has" if len(ranks) == 1 else "have"
    return Finding(
        cause=Cause.DEVICE_STUCK,
        culprit_ranks=ranks,
        confidence=Confidence.LIKELY,
        group=group,
        operation=call.operation,
        sequence=None if head.is_message else head.sequence,
        summary=f"the device of {rank_list(ranks)} {verb} not started {name} of group '{group}'"
        f"{at}, which was enqueued; the kernels of {rank_list(others)} run in it and wait",
        evidence=(
            f"{rank_list(ranks)}: {name} is the first pending operation, and only scheduled",
            f"{rank_list(others)}: {name} has started",
        ),
        scope=Scope.SHARED,
        fallout_ranks=picture.fallout(ranks),
        would_settle=(f"the kernels that run on the device of {rank_list(ranks)}, and its errors",),
        next_action=f"Look at the device of {rank_list(ranks)} and at the kernels enqueued before "
        f"{name}: one of them does not finish.",
    )
