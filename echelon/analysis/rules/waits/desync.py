"""Detect cycles of ranks that wait for each other after calling operations in different orders."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from echelon.analysis.evidence.matching.waits import Wait, WaitGraph
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.streams.habit import least_habitual
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.rules.calls.parted import slip_cause
from echelon.analysis.rules.waits.stuck import wait_line

_MAX_TRIED = 32
_MISSING = (
    "which of these ranks left its usual order: the calls that they completed before, which lists "
    "of active entries and rings that have wrapped do not hold (a larger buffer does)"
)
_SMALL_RING = 2


def find_desync(picture: Picture) -> list[Finding]:
    """Report the ranks in a cycle of waits, or the one rank that caused the cycle."""
    ring = picture.graph.cycle()
    if not ring:
        return []
    members = set(ring)
    waits = [w for w in picture.graph.waits if members & set(w.waiting) and members & set(w.absent)]
    waits.sort(key=lambda wait: wait.since_ns)
    first = waits[0]
    sureness = _sureness(picture, ring, waits)
    odd = _breaker(waits, members, picture.evidence.ranks)
    if picture.streams is not None:
        # The order here is that of streams: a cycle may be only part of what one rank's slip has
        # stopped.
        novel = least_habitual(picture.streams, ring)
        odd = novel if odd is None else odd
        if odd is not None:
            return [_describe_odd(picture, odd, ring, waits, is_habit=odd == novel)]
    groups = sorted({wait.group for wait in waits})
    what = (
        f"groups {', '.join(repr(g) for g in groups)}"
        if len(groups) > 1
        else f"group '{groups[0]}'"
    )
    parts = "; ".join(f"{rank_list(w.waiting)} in {w} of '{w.group}'" for w in waits[:3])
    return [
        Finding(
            cause=Cause.ORDER_DESYNC,
            culprit_ranks=ring,
            confidence=sureness,
            group=first.group,
            operation=first.operation,
            sequence=first.number,
            summary=f"{rank_list(ring)} wait for each other in a cycle: {parts}",
            evidence=(*(wait_line(wait) for wait in waits[:6]), *_stands_alone(odd, ring)),
            fallout_ranks=picture.fallout(ring),
            would_settle=() if sureness is Confidence.CERTAIN else (_MISSING,),
            next_action=f"Call the operations of {what} in the same order on every rank.",
        )
    ]


def _sureness(picture: Picture, ring: tuple[int, ...], waits: list[Wait]) -> Confidence:
    """Return the confidence that the whole cycle is at fault."""
    if picture.streams is None:
        return Confidence.CERTAIN
    has_messages = any(wait.is_p2p for wait in waits)
    return Confidence.POSSIBLE if has_messages or len(ring) > _SMALL_RING else Confidence.CERTAIN


def _breaker(waits: list[Wait], ring: set[int], recorded: Collection[int]) -> int | None:
    """Return the only rank whose removal breaks the cycle, or None if there is not exactly one.

    In at least one of the waits, this rank must be the only one, among the ranks for which there is
    evidence, that has not entered the operation.
    """
    seen = [[rank for rank in wait.absent if rank in recorded] for wait in waits]
    alone = {absent[0] for absent in seen if len(absent) == 1} & ring
    if len(alone) > _MAX_TRIED:
        return None
    found = [rank for rank in sorted(alone) if not _without(waits, rank).cycle()]
    return found[0] if len(found) == 1 else None


def _without(waits: list[Wait], rank: int) -> WaitGraph:
    return WaitGraph(
        tuple(
            replace(
                wait,
                waiting=tuple(one for one in wait.waiting if one != rank),
                absent=tuple(one for one in wait.absent if one != rank),
            )
            for wait in waits
        )
    )


def _describe_odd(
    picture: Picture, odd: int, ring: tuple[int, ...], waits: list[Wait], *, is_habit: bool
) -> Finding:
    """Report the one rank in a cycle that deviated from its usual order of calls."""
    near = [wait for wait in waits if odd in wait.absent or odd in wait.waiting]
    first = next((wait for wait in near if odd in wait.absent), waits[0])
    own = next((wait for wait in near if odd in wait.waiting), first)
    by_waits = Cause.P2P_UNMATCHED if first.is_p2p and own.is_p2p else Cause.ORDER_DESYNC
    is_sure = is_habit or not (own.is_p2p or first.is_p2p)
    return Finding(
        cause=slip_cause(picture, odd) or by_waits,
        culprit_ranks=(odd,),
        confidence=Confidence.LIKELY if is_sure else Confidence.POSSIBLE,
        group=first.group,
        operation=first.operation,
        sequence=first.number,
        summary=f"rank {odd} is in {own} of group '{own.group}' while {rank_list(first.waiting)} "
        f"{'waits' if len(first.waiting) == 1 else 'wait'} for it in {first} of group "
        f"'{first.group}': it called the two in a different order from the other ranks",
        evidence=(*(wait_line(wait) for wait in near[:6]), *_stands_alone(odd, ring)),
        fallout_ranks=picture.fallout((odd,)),
        would_settle=("the calls that the program makes there, in order",),
        next_action=f"Compare the order of rank {odd}'s calls before {own} with the other ranks'.",
    )


def _stands_alone(odd: int | None, ring: tuple[int, ...]) -> tuple[str, ...]:
    if odd is None or len(ring) < 3:
        return ()
    others = tuple(rank for rank in ring if rank != odd)
    return (f"rank {odd} stands alone: {rank_list(others)} wait in one order, it in the other",)
