"""Detect a rank that diverged from other ranks running the same program.

Ranks that run the same program make the same calls in the same order across all groups. The first
call that differs from the calls of all peers shows which rank went wrong.
"""

from __future__ import annotations

from typing import Any

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.evidence.streams.habit import slip_of
from echelon.analysis.evidence.streams.programs import Parting, partings
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.recorder.format.schema import Flag

_MATCHED = 2  # calls that must agree again after a shift
_SHIFTS = (1, 2, 3)


def find_parted(picture: Picture) -> list[Finding]:
    """Report the rank whose calls differ from those of its peers, if there is exactly one."""
    streams = picture.streams
    if streams is None or not picture.graph.waits:
        return []
    found = partings(streams)
    if len(found) != 1:
        return []
    finding = _describe(picture, found[0])
    return [] if finding is None else [finding]


def _describe(picture: Picture, seen: Parting) -> Finding | None:
    evidence = picture.evidence
    own = evidence.ranks[seen.rank].rows[seen.row]
    usual_rank, place = seen.usual
    other = evidence.ranks[usual_rank].rows[place]
    kind = _kind(seen)
    if kind == "instead" and not _is_message(own) and own["group"] == other["group"]:
        return None  # another call in its place: the vote of the group is more precise
    cause, words = _words(kind, own, other)
    if not kind:
        cause = slip_cause(picture, seen.rank) or cause
    usual, called = _call(picture, other), _call(picture, own)
    fewer = len(seen.others) == 1
    against = f"{rank_list(seen.others)}, which {'runs' if fewer else 'run'} the same program,"
    ranks = (seen.rank,)
    return Finding(
        cause=cause,
        culprit_ranks=ranks,
        confidence=Confidence.LIKELY,
        group=evidence.groups[int(other["group"])].name,
        operation=evidence.call(other).operation,
        sequence=int(other["sequence"]) if other["sequence"] >= 0 else None,
        summary=f"rank {seen.rank} {words.format(usual=usual, called=called)}: until then, "
        f"it made the same calls as {against}",
        evidence=(
            f"rank {seen.rank} called {called}",
            f"{rank_list(seen.others)} called {usual} in its place, after the same calls",
        ),
        fallout_ranks=picture.fallout(ranks),
        scope=Scope.SHARED,
        next_action=f"Look for a condition before {called} that holds on rank {seen.rank} alone.",
    )


def _kind(seen: Parting) -> str:
    """Return how the calls differ: "left out", "extra", "instead" or "swapped"; "" if unclear."""
    own, others = seen.later
    if len(own) > 1 and len(others) > 1 and own[0] == others[1] and own[1] == others[0]:
        return "swapped"
    for shift in _SHIFTS:
        if _agree(own, others[shift:]):
            return "left out"
        if _agree(own[shift:], others):
            return "extra"
    return "instead" if _agree(own[1:], others[1:]) else ""


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    length = min(len(one), len(other))
    return length >= _MATCHED and one[:length] == other[:length]


def _words(kind: str, own: Any, other: Any) -> tuple[Cause, str]:
    """Return the cause and a message template for a kind of difference between two ranks' calls."""
    if kind == "swapped":
        return Cause.ORDER_DESYNC, "called {called} before {usual}, not after it"
    if kind == "left out":
        cause = Cause.P2P_UNMATCHED if _is_message(other) else Cause.SKIPPED_COLLECTIVE
        return cause, "skipped {usual} and moved on to {called}"
    if kind == "extra":
        cause = Cause.P2P_UNMATCHED if _is_message(own) else Cause.SKIPPED_COLLECTIVE
        return cause, "called {called} once more than the others, before {usual}"
    both = _is_message(own) and _is_message(other)
    cause = Cause.P2P_UNMATCHED if both else Cause.ORDER_DESYNC
    return cause, "called {called} where {usual} was expected"


def _is_message(row: Any) -> bool:
    return bool(row["flags"] & Flag.P2P)


def _call(picture: Picture, row: Any) -> str:
    evidence = picture.evidence
    operation = evidence.call(row).operation
    site = short_site(evidence.site(row))
    name = f"{operation} of group '{evidence.groups[int(row['group'])].name}'"
    if _is_message(row):
        name = f"{operation} with rank {int(row['peer'])}"
    return name + (f" at {site}" if site else "")


def slip_cause(picture: Picture, rank: int) -> Cause | None:
    """Return the cause if a rank's call history reveals a missing or an extra call, else None."""
    slip = None if picture.streams is None else slip_of(picture.streams, rank)
    if slip is None:
        return None
    row = picture.evidence.ranks[rank].rows[slip[1]]
    return Cause.P2P_UNMATCHED if _is_message(row) else Cause.SKIPPED_COLLECTIVE
