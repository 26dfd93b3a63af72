"""Detect ranks that made different calls under the same sequence number in a group.

The members of the group vote on each call. The earliest sequence number at which the calls differ
is taken as the root cause, and the minority is reported. In a tie, the members of all tied sides
are reported. `skipped.py` decides whether a rank passed a wrong argument or slipped by one
operation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.calls import TRANSPOSED, Call
from echelon.analysis.evidence.matching.lanes import ABSENT, Lanes
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.recorder.format.schema import State

_NAMED = re.compile(r"\brank (\d{1,7}) (?:passed|called)\b")


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first sequence number under which the members of a group made different calls.

    `sides` holds the member indices of each side, with the strongest side first.
    """

    lanes: Lanes
    column: int
    sides: tuple[tuple[int, ...], ...]

    @property
    def sequence(self) -> int:
        """The sequence number at which the calls differ."""
        return int(self.lanes.sequences[self.column])

    @property
    def is_tie(self) -> bool:
        """True if the strongest side is tied with another side."""
        return len(self.sides[0]) == len(self.sides[1])

    @property
    def is_complete(self) -> bool:
        """True if the calls of all members of the group are known."""
        return sum(map(len, self.sides)) == len(self.lanes.members) + len(self.lanes.strangers)

    @property
    def began_ns(self) -> int:
        """The time of the earliest call with this sequence number in the group."""
        return min(int(self.row(member)["created_ns"]) for side in self.sides for member in side)

    def row(self, member: int) -> Any:
        """Return a member's row for the differing call. `member` must be in one of `sides`."""
        row = self.lanes.row(member, self.column)
        assert row is not None, (member, self.column)
        return row

    def call(self, side: Sequence[int]) -> Call:
        """Return the call that the members on one side of the vote made."""
        return self.lanes.evidence.call(self.row(side[0]))

    def site(self, side: Sequence[int]) -> str:
        """Return the call site of the members on one side of the vote, or "" if unknown."""
        return self.lanes.evidence.site(self.row(side[0]))


def divergence(lanes: Lanes) -> Divergence | None:
    """Return a group's first divergence, or None if all calls agree."""
    votes = lanes.comparable
    if votes.shape[0] < 2 or not votes.shape[1]:
        return None
    low = np.where(votes == ABSENT, np.iinfo(np.int32).max, votes).min(axis=0)
    differing = np.flatnonzero((votes.max(axis=0) != low) & (votes.max(axis=0) != ABSENT))
    for column in differing.tolist():
        if not _was_harmless(lanes, column):
            return Divergence(lanes=lanes, column=column, sides=_sides(votes[:, column]))
    return None


def _was_harmless(lanes: Lanes, column: int) -> bool:
    """Return whether all members completed the call in `column` and at least one later call."""
    done = (lanes.state == State.COMPLETED).all(axis=0)
    return bool(done[column] and done[column + 1 :].any())


def _sides(votes: npt.NDArray[Any]) -> tuple[tuple[int, ...], ...]:
    counted = Counter(votes[votes != ABSENT].tolist()).most_common()
    sides = [tuple(np.flatnonzero(votes == vote).tolist()) for vote, _ in counted]
    return tuple(sorted(sides, key=lambda side: (-len(side), side)))


def culprits(found: Divergence) -> tuple[int, ...]:
    """Return the members that differ from the majority or, in a tie, the members of all tied sides.

    If the calls of some members are not recorded, the recorded error or the ranks' earlier calls
    can break the tie.
    """
    if not found.is_tie:
        return tuple(sorted(member for side in found.sides[1:] for member in side))
    if not found.is_complete:
        odd = _odd_by_error(found) or _odd_by_habit(found)
        if odd:
            return odd
    strongest = len(found.sides[0])
    tied = [side for side in found.sides if len(side) == strongest]
    return tuple(sorted(member for side in tied for member in side))


def _odd_by_error(found: Divergence) -> tuple[int, ...]:
    """Return the member named in the recorded mismatch errors; () if they name none or several."""
    evidence = found.lanes.evidence
    texts = {evidence.error(found.row(member)) for side in found.sides for member in side}
    named = {int(rank) for text in texts for rank in _NAMED.findall(text)}
    members = [m for side in found.sides for m in side if int(found.lanes.members[m]) in named]
    return tuple(members) if len(named) == 1 and len(members) == 1 else ()


def _odd_by_habit(found: Divergence) -> tuple[int, ...]:
    """If only one of two sides made a call that is new at its site, return that side; else ()."""
    novel = [side for side in found.sides if not _is_habit(found, side)]
    return novel[0] if len(novel) == 1 and len(found.sides) == 2 else ()


def _is_habit(found: Divergence, side: Sequence[int]) -> bool:
    """Return whether a side of a mismatch made the same call earlier at the same call site."""
    member = side[0]
    row = found.row(member)
    lanes = found.lanes
    earlier = lanes.evidence.ranks[int(lanes.members[member])].rows
    same = (earlier["group"] == row["group"]) & (earlier["call"] == row["call"])
    same &= (earlier["site"] == row["site"]) & (earlier["sequence"] < row["sequence"])
    return bool(same.any())


def kind_of(odd: Call, usual: Call) -> Cause:
    """Classify the difference between two calls."""
    if odd.operation != usual.operation:
        return Cause.OP_MISMATCH
    if odd.signature.dtype != usual.signature.dtype:
        return Cause.DTYPE_MISMATCH
    if (
        odd.signature.shapes != usual.signature.shapes
        or odd.signature.summary != usual.signature.summary
    ):
        return Cause.SHAPE_MISMATCH
    if odd.reduce_op != usual.reduce_op:
        return Cause.REDUCE_OP_MISMATCH
    if odd.root != usual.root:
        return Cause.ROOT_MISMATCH
    return Cause.SPLIT_MISMATCH if odd.operation in TRANSPOSED else Cause.SHAPE_MISMATCH


def earliest(picture: Picture) -> Divergence | None:
    """Return the earliest divergence in any group that is still in use, or None."""
    found = [one for lanes in picture.lanes_in_use if (one := divergence(lanes)) is not None]
    return min(found, key=lambda one: one.began_ns, default=None)


def find_mismatch(picture: Picture) -> list[Finding]:
    """Report the earliest divergence between the ranks' calls."""
    found = earliest(picture)
    return [] if found is None else [describe(picture, found)]


def describe(picture: Picture, found: Divergence) -> Finding:
    """Turn a divergence into a finding that shows the arguments and the call site of each side."""
    odd = culprits(found)
    ranks = found.lanes.ranks(odd)
    innocent = next((side for side in found.sides if not set(side) & set(odd)), None)
    usual = innocent or found.sides[0]
    other = next(side for side in found.sides if side != usual)
    usual_call, odd_call = found.call(usual), found.call(other)
    cause = kind_of(odd_call, usual_call)
    rest = "the others" if innocent else rank_list(found.lanes.ranks(usual))
    who = rank_list(ranks if innocent else found.lanes.ranks(other))
    site = short_site(found.site(other))
    at = f" at {site}" if site else ""
    where = f"{usual_call.operation} #{found.sequence} of group '{found.lanes.name}'"
    return Finding(
        cause=cause,
        culprit_ranks=ranks,
        confidence=_sureness(found, has_innocent=innocent is not None),
        group=found.lanes.name,
        operation=usual_call.operation,
        sequence=found.sequence,
        summary=f"{who} called {odd_call}{at}, {rest} {usual_call}, as {where}",
        evidence=tuple(_side_lines(found)) + tuple(error_lines(picture)),
        fallout_ranks=picture.fallout(ranks),
        would_settle=_tie_note(found),
        next_action=_next_action(cause, ranks, site, is_tie=innocent is None),
        scope=Scope.GROUP,
    )


def _sureness(found: Divergence, *, has_innocent: bool) -> Confidence:
    """Return how certain it is which side is wrong, given how many members have no record."""
    num_missing = len(found.lanes.strangers)
    if found.is_tie:
        return Confidence.LIKELY if has_innocent or not num_missing else Confidence.POSSIBLE
    margin = len(found.sides[0]) - len(found.sides[1])
    return Confidence.CERTAIN if num_missing < margin else Confidence.LIKELY


def _side_lines(found: Divergence) -> list[str]:
    lines = []
    for side in found.sides[:4]:
        site = short_site(found.site(side))
        ranks = rank_list(found.lanes.ranks(side))
        lines.append(f"{ranks} called {found.call(side)}" + (f" at {site}" if site else ""))
    if len(found.sides) > 4:
        lines.append(f"{len(found.sides) - 4} more sides differ too")
    return lines


def error_lines(picture: Picture, limit: int = 1) -> list[str]:
    """Quote up to `limit` mismatch errors that ranks recorded."""
    lines: list[str] = []
    for rank, facts in picture.evidence.ranks.items():
        if len(lines) < limit and len(facts.rows):
            text = picture.evidence.error(facts.rows[-1])
            if "MismatchError" in text:
                lines.append(f"rank {rank} recorded: {text.splitlines()[0]}")
    return lines


def _tie_note(found: Divergence) -> tuple[str, ...]:
    if not found.is_tie:
        return ()
    return ("a vote of more ranks: the two sides are equally strong",)


def _next_action(cause: Cause, ranks: Sequence[int], site: str, *, is_tie: bool) -> str:
    who = rank_list(ranks)
    place = f" at {site}" if site else ""
    if cause is Cause.OP_MISMATCH and is_tie:
        return f"Compare the stacks of {who}: they reached different calls by different branches."
    if cause is Cause.OP_MISMATCH:
        return f"Look for a branch{place} that {who} takes and the others do not."
    if cause is Cause.SPLIT_MISMATCH:
        return f"Exchange the split sizes before the all_to_all, or correct those of {who}{place}."
    noun = {
        Cause.DTYPE_MISMATCH: "dtype",
        Cause.SHAPE_MISMATCH: "shape",
        Cause.REDUCE_OP_MISMATCH: "reduce operation",
        Cause.ROOT_MISMATCH: "root",
    }[cause]
    if is_tie:
        return f"Find out which of {who} passes the wrong {noun}; print it on each of them."
    return f"Find out why {who} passes a different {noun}{place}; print it on every rank there."
