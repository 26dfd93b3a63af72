"""Detect inconsistent all_to_all split sizes.

The split that rank i sends to rank j must be as large as the split that rank j receives from it.
torch's dumps contain only totals, so only the total sent and the total received can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from echelon.analysis.evidence.calls import TRANSPOSED, Call
from echelon.analysis.evidence.matching.lanes import Lanes
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list

_MAX_MEMBERS = 4096  # beyond this the splits do not fit into a slot anyway


def find_split_mismatch(picture: Picture) -> list[Finding]:
    """Report the first unfinished all_to_all whose splits are inconsistent."""
    for lanes in picture.lanes_in_use:
        for column in _open_columns(lanes):
            odd = odd_members(lanes, column)
            if odd:
                return [_describe(picture, lanes, column, odd)]
    return []


def _open_columns(lanes: Lanes) -> list[int]:
    """Return the columns of incomplete all_to_all calls that all members have entered."""
    if lanes.strangers or len(lanes.members) > _MAX_MEMBERS:
        return []
    entered = np.asarray((lanes.rows >= 0).all(axis=0))
    columns = sorted({int(column) for column in lanes.pending if column >= 0 and entered[column]})
    return [column for column in columns if _calls(lanes, column)[0].operation in TRANSPOSED]


def _calls(lanes: Lanes, column: int) -> list[Call]:
    rows: list[Any] = [lanes.row(member, column) for member in range(len(lanes.members))]
    return [lanes.evidence.call(row) for row in rows]


def odd_members(lanes: Lanes, column: int) -> tuple[int, ...]:
    """Return the members whose splits are most inconsistent, or () if all splits are consistent."""
    signatures = [call.signature for call in _calls(lanes, column)]
    size = len(signatures)
    sends = [s.input_splits for s in signatures]
    receives = [s.output_splits for s in signatures]
    if all(len(s) == size for s in (*sends, *receives)):
        return _odd_in_matrix(np.array(sends), np.array(receives))
    return _odd_in_totals([_surplus(s.shapes) for s in signatures])


def _odd_in_matrix(sends: Any, receives: Any) -> tuple[int, ...]:
    broken = np.argwhere(sends != receives.T)
    if not len(broken):
        return ()
    counted = Counter(int(member) for pair in broken for member in set(pair.tolist()))
    most = max(counted.values())
    tied = [member for member, count in counted.items() if count == most]
    rows = [(tuple(a), tuple(b)) for a, b in zip(sends.tolist(), receives.tolist(), strict=True)]
    alone = [member for member in tied if rows.count(rows[member]) == 1]
    return tuple(sorted(alone or tied))


def _odd_in_totals(surplus: Sequence[int | None]) -> tuple[int, ...]:
    known = [value for value in surplus if value is not None]
    if len(known) < len(surplus) or sum(known) == 0:
        return ()
    alone = [member for member, value in enumerate(known) if value == sum(known)]
    rest_fits = len(alone) == 1 and all(v == 0 for m, v in enumerate(known) if m != alone[0])
    return tuple(alone) if rest_fits else tuple(m for m, value in enumerate(known) if value)


def _surplus(shapes: Sequence[Sequence[int]]) -> int | None:
    """Return how many more elements a member sends than it receives, or None if unknown."""
    return prod(shapes[0]) - prod(shapes[1]) if len(shapes) == 2 else None


def _line(rank: int, call: Call) -> str:
    signature = call.signature
    if not signature.input_splits:
        return f"rank {rank} passed {call}"
    sends, receives = list(signature.input_splits), list(signature.output_splits)
    return f"rank {rank} passed {call}, sends {sends}, receives {receives}"


def _describe(picture: Picture, lanes: Lanes, column: int, odd: tuple[int, ...]) -> Finding:
    calls = _calls(lanes, column)
    ranks = lanes.ranks(odd)
    sequence = int(lanes.sequences[column])
    row = lanes.row(odd[0], column)
    site = short_site(lanes.evidence.site(row))
    usual = [m for m in range(len(calls)) if m not in odd]
    lines = [_line(int(lanes.members[m]), calls[m]) for m in (*odd[:4], *usual[:1])]
    who = rank_list(ranks)
    operation = calls[0].operation
    return Finding(
        cause=Cause.SPLIT_MISMATCH,
        culprit_ranks=ranks,
        confidence=Confidence.CERTAIN if len(odd) == 1 else Confidence.LIKELY,
        group=lanes.name,
        operation=operation,
        sequence=sequence,
        summary=f"the split sizes of {who} do not fit the others' in {operation} #{sequence} of "
        f"group '{lanes.name}'" + (f" ({site})" if site else ""),
        evidence=tuple(lines),
        fallout_ranks=picture.fallout(ranks),
        next_action=f"Exchange the split sizes before the call, or correct those of {who}.",
        scope=Scope.GROUP,
    )
