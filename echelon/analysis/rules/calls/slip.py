"""Detect a rank whose sequence of collectives has shifted, and determine by how many calls.

The signs of such a shift, or slip, strongest first:

- The rank's sequence matches the other ranks' sequences again after being shifted.
- The step numbers differ.
- The rank made the call that usually follows or precedes the expected call.
- The data loader is exhausted on this rank but not on the other ranks.
- The rank has left the loop and called a barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.matching.lanes import ABSENT, Lanes
from echelon.analysis.evidence.model import DATA_END, DATA_WAIT
from echelon.analysis.rules.calls.mismatch import Divergence, culprits

_SHIFTS = (1, -1, 2, -2, 3, -3)
_LOOK_BACK = 512  # columns that are searched for a period
_CONTEXTS = (8, 4, 2, 1)  # length of the context that a habit is judged by
_LEFT_LOADER = "it has ended its loop over a data loader, and the others have not"
_BARRIERS = frozenset({"barrier", "monitored_barrier"})


@dataclass(frozen=True, kw_only=True)
class Slip:
    """The ranks that slipped in one group, and the number of calls by which they slipped."""

    lanes: Lanes
    column: int
    odd: tuple[int, ...]  # member indices
    usual: int  # a member of the others
    shift: int  # by how many collectives the rank is ahead; negative: behind; 0: not known
    sign: str  # what shows it
    certain: bool


# ---- a slip behind a difference in the signatures ----


def slip_at(found: Divergence) -> Slip | None:
    """Return the slip of one call stream that explains a divergence, or None if no slip does."""
    odd = culprits(found)
    usual = next((side for side in found.sides if not set(side) & set(odd)), None)
    if usual is None:  # a tie: try both assignments
        first, second = found.sides[0], found.sides[1]
        return _decide_tie(found, _slip(found, second, first[0]), _slip(found, first, second[0]))
    return _slip(found, odd, usual[0])


def _slip(found: Divergence, odd: Sequence[int], usual: int) -> Slip | None:
    lanes, column = found.lanes, found.column
    for sign in (_realigns, _by_step, _by_period, _by_loader, _by_barrier):
        seen = sign(lanes, column, odd[0], usual)
        if seen is not None:
            shift, words, certain = seen
            return Slip(
                lanes=lanes,
                column=column,
                odd=tuple(odd),
                usual=usual,
                shift=shift,
                sign=words,
                certain=certain,
            )
    return None


_Sign = tuple[int, str, bool] | None


def _realigns(lanes: Lanes, column: int, odd: int, usual: int) -> _Sign:
    """Return a sign of a slip if the streams agree again once one of them is shifted."""
    odd_votes, usual_votes = lanes.comparable[odd, column:], lanes.comparable[usual, column:]
    later = (odd_votes[1:] != ABSENT) & (usual_votes[1:] != ABSENT)
    if later.any() and (odd_votes[1:][later] == usual_votes[1:][later]).all():
        return None  # aligned again without a shift: one wrong call, not a slip
    for shift in _SHIFTS:
        ahead = odd_votes[: len(odd_votes) - shift] if shift > 0 else odd_votes[-shift:]
        behind = usual_votes[shift:] if shift > 0 else usual_votes[: len(usual_votes) + shift]
        both = (ahead != ABSENT) & (behind != ABSENT)
        if np.count_nonzero(both) >= 2 and (ahead[both] == behind[both]).all():
            count = int(np.count_nonzero(both))
            return shift, f"its next {count} calls equal the others' shifted by {abs(shift)}", True
    return None


def _by_step(lanes: Lanes, column: int, odd: int, usual: int) -> _Sign:
    odd_row, usual_row = lanes.row(odd, column), lanes.row(usual, column)
    if odd_row is None or usual_row is None:
        return None
    odd_step, usual_step = int(odd_row["step"]), int(usual_row["step"])
    if (
        min(odd_step, usual_step) < 0
        or odd_step == usual_step
        or _steps_never_agree(lanes, column, odd, usual)
    ):
        return None
    shift = 1 if odd_step > usual_step else -1
    return shift, f"it is in step {odd_step}, the others in step {usual_step}", True


def _steps_never_agree(lanes: Lanes, column: int, odd: int, usual: int) -> bool:
    """Return whether the step numbers of two ranks differ in every column before `column`."""
    steps = lanes.column("step")
    a, b = steps[odd, :column], steps[usual, :column]
    both = (a >= 0) & (b >= 0)
    return bool(both.any() and (a[both] != b[both]).all())


def _by_period(lanes: Lanes, column: int, odd: int, usual: int) -> _Sign:
    """Return a sign of a slip if a rank skipped ahead in a repeated sequence or repeated a call.

    Otherwise, return None.
    """
    keys = _keys(lanes, usual)
    odd_key, usual_key = _keys(lanes, odd)[column], keys[column]
    if not _has_site(lanes, odd, column):
        return None  # without call sites an equal signature says nothing about the place
    past = keys[max(0, column - _LOOK_BACK) : column]
    for place in range(len(past) - 1, -1, -1):
        if past[place] != usual_key:
            continue
        for ahead in range(1, 4):
            if place + ahead < len(past) and past[place + ahead] == odd_key:
                return ahead, "it made the call that follows this one in earlier periods", True
        break
    if past and past[-1] == odd_key and _was_followed(past, odd_key, usual_key):
        return -1, "it repeated the call before this one", True
    return None


def _has_site(lanes: Lanes, member: int, column: int) -> bool:
    row = lanes.row(member, column)
    return row is not None and int(row["site"]) > 0


def _was_followed(past: Sequence[object], first: object, second: object) -> bool:
    return any(a == first and b == second for a, b in pairwise(past))


def _by_loader(lanes: Lanes, column: int, odd: int, usual: int) -> _Sign:
    """Return evidence of a slip if `odd` has exhausted its data loader but `usual` has not."""
    if not _has_left_loader(lanes, odd, column) or _has_left_loader(lanes, usual, column):
        return None
    return 1, _LEFT_LOADER, False


def _has_left_loader(lanes: Lanes, member: int, column: int) -> bool:
    """Return whether a member had exhausted its data loader before its call in `column`."""
    row = lanes.row(member, column)
    if row is None:
        return False
    evidence = lanes.evidence
    spans = evidence.ranks[int(lanes.members[member])].spans
    spans = spans[spans["started_ns"] <= row["created_ns"]]
    marks = [evidence.tables.texts[number] for number in spans["name"].tolist()]
    last = next((name for name in reversed(marks) if name in (DATA_WAIT, DATA_END)), "")
    return last == DATA_END


def _by_barrier(lanes: Lanes, column: int, odd: int, usual: int) -> _Sign:
    """Return a sign of a slip if only one of the two members is already at a barrier."""
    odd_row, usual_row = lanes.row(odd, column), lanes.row(usual, column)
    if odd_row is None or usual_row is None or odd_row["site"] == usual_row["site"]:
        return None
    evidence = lanes.evidence
    odd_op, usual_op = evidence.call(odd_row).operation, evidence.call(usual_row).operation
    if (odd_op in _BARRIERS) == (usual_op in _BARRIERS):
        return None
    if odd_op in _BARRIERS:
        return 1, f"it has moved on to the {odd_op} while the others still call {usual_op}", False
    return -1, f"it still calls {odd_op} while the others have moved on to the {usual_op}", False


def _keys(lanes: Lanes, member: int) -> list[object]:
    votes = lanes.comparable[member].tolist()
    sites = lanes.column("site")[member].tolist()
    return [
        None if vote == ABSENT else (vote, site) for vote, site in zip(votes, sites, strict=True)
    ]


def _decide_tie(found: Divergence, one: Slip | None, other: Slip | None) -> Slip | None:
    """Decide which of a divergence's two equally strong sides slipped."""
    if one is None and other is None:
        return None
    known = one or other
    assert known is not None
    if known.sign == _LEFT_LOADER:  # true of exactly one side
        return known
    lengths = {side: _odd_lengths(found.lanes, side[0], found.column) for side in found.sides[:2]}
    broken = [side for side, odd in lengths.items() if odd]
    by_habit = len(broken) != 1
    if by_habit:
        habits = [(s, _breaks_habit(found.lanes, s[0], found.column)) for s in found.sides[:2]]
        broken = [side for side, breaks in habits if breaks]
        by_habit = len(broken) == 1 and all(breaks is not None for _, breaks in habits)
    if len(broken) == 1:
        for slip in (one, other):
            if slip is not None and slip.odd == tuple(broken[0]):
                return replace(slip, certain=slip.certain and not by_habit)
        shift = -known.shift
        usual = next(side for side in found.sides[:2] if side != broken[0])[0]
        return Slip(
            lanes=known.lanes,
            column=known.column,
            odd=broken[0],
            usual=usual,
            shift=shift,
            sign=known.sign,
            certain=known.certain and not by_habit,
        )
    both = tuple(sorted(found.sides[0] + found.sides[1]))
    return Slip(
        lanes=known.lanes,
        column=known.column,
        odd=both,
        usual=known.usual,
        shift=0,
        sign=known.sign,
        certain=False,
    )


def _breaks_habit(lanes: Lanes, member: int, column: int) -> bool | None:
    """Return whether a call is new in its context, the sequence of calls that precede it.

    The result is None if the context does not occur earlier in the rank's record.
    """
    keys = _keys(lanes, member)[max(0, column - _LOOK_BACK) : column + 1]
    past, current = keys[:-1], keys[-1]
    for length in _CONTEXTS:
        context = past[len(past) - length :]
        if len(context) < length:
            continue
        after = [
            past[place + length]
            for place in range(len(past) - length)
            if past[place : place + length] == context
        ]
        if after:
            return current not in after
    return None


def _odd_lengths(lanes: Lanes, member: int, column: int) -> bool:
    """Return whether a member's previous or current step has an unusual number of calls."""
    steps = lanes.column("step")[member, : column + 1]
    steps = steps[steps >= 0]
    if not len(steps):
        return False
    counts = Counter(steps.tolist())
    first, last = int(steps[0]), int(steps[-1])
    finished = [counts[s] for s in sorted(counts) if first < s < last]
    if len(finished) < 2:
        return False
    usual = Counter(finished[:-1]).most_common(1)[0][0]
    return finished[-1] != usual or counts[last] > usual


# ---- a slip that no signature shows ----


def silent_slip(lanes: Lanes) -> Slip | None:
    """Return a slip that shows only in call sites or step numbers, or None.

    Call this only if a fault is already evident, because programs are free to number their steps in
    any way.
    """
    if len(lanes.members) < 2 or not lanes.rows.shape[1]:
        return None
    steps = lanes.column("step")
    column = _first_lasting_difference(steps)
    if column is None:
        return None
    votes = Counter(steps[:, column][steps[:, column] >= 0].tolist()).most_common()
    if len(votes) != 2 or votes[0][1] == votes[1][1]:
        return None
    usual = int(np.flatnonzero(steps[:, column] == votes[0][0])[0])
    odd = tuple(np.flatnonzero(steps[:, column] == votes[1][0]).tolist())
    shift = _full_shift(lanes, steps, column, odd[0], usual)
    if shift == 0:
        return None
    sign = (
        f"it is in step {votes[1][0]}, the others in step {votes[0][0]}, "
        f"and stays shifted by {abs(shift)}"
    )
    return Slip(
        lanes=lanes, column=column, odd=odd, usual=usual, shift=shift, sign=sign, certain=True
    )


def _first_lasting_difference(steps: npt.NDArray[Any]) -> int | None:
    """Return the first column in which the members' step numbers differ.

    The result is None if the step numbers never differ, or if they did not agree in any earlier
    column.
    """
    high = steps.max(axis=0)
    low = np.where(steps < 0, np.iinfo(np.int32).max, steps).min(axis=0)
    shared = (steps >= 0).sum(axis=0) >= 2
    differs = np.flatnonzero(shared & (high != low))
    if not len(differs):
        return None
    column = int(differs[0])
    agreed = shared[:column] & (high[:column] == low[:column])
    return column if agreed.any() else None


def _full_shift(lanes: Lanes, steps: npt.NDArray[Any], column: int, odd: int, usual: int) -> int:
    sites = lanes.column("site")
    streams = []
    for member in (odd, usual):
        parts = (lanes.comparable[member, column:], sites[member, column:], steps[member, column:])
        streams.append(np.stack(parts))
    ahead, behind = streams
    for shift in _SHIFTS:
        a = ahead[:, : ahead.shape[1] - shift] if shift > 0 else ahead[:, -shift:]
        b = behind[:, shift:] if shift > 0 else behind[:, : behind.shape[1] + shift]
        both = (a[0] != ABSENT) & (b[0] != ABSENT)
        if np.count_nonzero(both) >= 1 and (a[:, both] == b[:, both]).all():
            return shift
    return 0
