"""Compare the source lines of ranks that left no record and are all waiting in collectives.

Ranks at different lines are probably inside different calls. For example, one rank might have left
the loop and reached the next barrier. Ranks at the same line are probably inside the same call.
Source lines are not proof, because two lines can make the same call, and one line can make several
calls.
"""

from __future__ import annotations

from echelon.analysis.activity import Activity, Doing
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import Frame
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.rules.one_rank.doing import activity_of
from echelon.analysis.rules.one_rank.outside import is_in_collective

_WAITING = frozenset({Doing.COLLECTIVE, Doing.BACKWARD})
_MAX_SHOWN = 4


def find_apart(picture: Picture) -> list[Finding]:
    """Report the ranks that called their current collective at another line than most ranks did."""
    places = _places(picture)
    if not places:
        return []
    if len(places) == 1:
        return [_together(*next(iter(places.items())))]
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
    (common, most), rest = ordered[0], ordered[1:]
    fewer = tuple(sorted(rank for _, ranks in rest for rank in ranks))
    is_tie = len(rest[0][1]) == len(most)
    culprits = tuple(sorted((*most, *fewer))) if is_tie else fewer
    first, ranks = rest[0]
    lines = [f"{rank_list(ranks)} in a collective at {place}" for place, ranks in ordered]
    return [
        Finding(
            cause=Cause.SKIPPED_COLLECTIVE,
            culprit_ranks=culprits,
            confidence=Confidence.POSSIBLE if is_tie else Confidence.LIKELY,
            summary=f"collectives at different lines: {rank_list(ranks)} at {first}, "
            f"{rank_list(most)} at {common}; they do not make the same calls",
            evidence=tuple(lines[:_MAX_SHOWN]),
            fallout_ranks=() if is_tie else most,
            would_settle=(
                "which collectives they are: a recording of them",
                *(("which side left the common order",) if is_tie else ()),
            ),
            next_action=f"Compare the calls that lead to {first} and to {common}: uneven batches, "
            "or a branch that not all ranks take.",
        )
    ]


def _together(place: Frame, ranks: tuple[int, ...]) -> Finding:
    """Report that all ranks are waiting in a collective at the same line of code."""
    return Finding(
        cause=Cause.UNKNOWN,
        culprit_ranks=(),
        confidence=Confidence.POSSIBLE,
        summary=f"all ranks wait in a collective at {place}: the network, or calls that differ",
        evidence=(f"{rank_list(ranks)} in a collective at {place}",),
        fallout_ranks=ranks,
        would_settle=(
            "whether the calls agree (shape, dtype, order): a recording, torch's flight recorder",
            "bytes moved between the ranks",
        ),
        next_action="Record the job (echelon run) or read torch's flight recorder; check the links "
        "between the machines.",
    )


def _places(picture: Picture) -> dict[Frame, tuple[int, ...]]:
    """Group the ranks by the line at which they wait; return {} unless all are in a collective."""
    evidence = picture.evidence
    if evidence.incident.kind != "stall" or evidence.missing or picture.graph.waits:
        return {}
    found: dict[Frame, tuple[int, ...]] = {}
    for rank, facts in evidence.ranks.items():
        activity: Activity = activity_of(facts)
        is_bare = not facts.has_ring and not len(facts.rows) and facts.host.alive
        if not is_bare or activity.line is None or activity.doing not in _WAITING:
            return {}
        if not is_in_collective(facts):
            return {}
        found[activity.line] = (*found.get(activity.line, ()), rank)
    return found
