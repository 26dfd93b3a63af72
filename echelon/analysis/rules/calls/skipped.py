"""Detect a rank whose stream of collectives has slipped because of a skipped or extra call.

After a slip, the same sequence number refers to different calls on different ranks. The signatures
can still match, for example if all buckets have the same shape. Therefore the step numbers and the
call sites are compared too (see `slip.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.analysis.evidence.matching.lanes import Lanes
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.analysis.rules.calls.mismatch import earliest, error_lines
from echelon.analysis.rules.calls.slip import Slip, silent_slip, slip_at


def find_skipped(picture: Picture) -> list[Finding]:
    """Report the earliest slip in any group's stream of collectives."""
    if not picture.in_trouble and earliest(picture) is None:
        return []
    slips = [slip for lanes in picture.lanes_in_use if (slip := silent_slip(lanes)) is not None]
    if slips:
        first = min(slips, key=lambda slip: _began(slip.lanes, slip.column))
        found = earliest(picture)
        if found is None or _began(first.lanes, first.column) <= found.began_ns:
            # If no signature differs, it explains only ranks that wait for this rank, or this rank.
            scope = Scope.CULPRITS if found is None else Scope.GROUP
            return [_describe(picture, first).changed(scope=scope)]
    found = earliest(picture)
    slip = None if found is None else slip_at(found)
    return [] if slip is None else [_describe(picture, slip)]


def _began(lanes: Lanes, column: int) -> int:
    stamps = [
        row["created_ns"]
        for m in range(len(lanes.members))
        if (row := lanes.row(m, column)) is not None
    ]
    return int(min(stamps))


def _describe(picture: Picture, slip: Slip) -> Finding:
    lanes = slip.lanes
    ranks = lanes.ranks(slip.odd)
    evidence = lanes.evidence
    odd_row, usual_row = lanes.row(slip.odd[0], slip.column), lanes.row(slip.usual, slip.column)
    usual_call = evidence.call(usual_row)
    sequence = int(lanes.sequences[slip.column])
    done = {0: "skipped or repeated", 1: "skipped", -1: "made"}[int(np.sign(slip.shift))]
    count = max(1, abs(slip.shift))
    number = "a collective" if count == 1 else f"{count} collectives"
    if slip.shift < 0:
        number = "an extra collective" if count == 1 else f"{count} extra collectives"
    who = rank_list(ranks)
    site, usual_site = short_site(evidence.site(odd_row)), short_site(evidence.site(usual_row))
    at = f" (it is at {site})" if site else ""
    here = f"{usual_call.operation} #{sequence} of group '{lanes.name}'"
    sign = slip.sign if len(ranks) == 1 else _plural(slip.sign)
    usual_rank = int(lanes.members[slip.usual])
    rest = f"rank {usual_rank}" if len(lanes.members) <= 2 else "the others"
    summary = f"{who} {done} {number}: {sign}, seen at {here}{at}"
    lines = [
        f"{who} called {evidence.call(odd_row)}" + (f" at {site}" if site else "") + _step(odd_row),
        f"{rest} called {usual_call}"
        + (f" at {usual_site}" if usual_site else "")
        + _step(usual_row),
        f"{who}: {sign}",
    ]
    return Finding(
        cause=Cause.SKIPPED_COLLECTIVE,
        culprit_ranks=ranks,
        confidence=Confidence.CERTAIN if slip.certain else Confidence.LIKELY,
        group=lanes.name,
        operation=usual_call.operation,
        sequence=sequence,
        summary=summary,
        evidence=(*lines, *error_lines(picture)),
        fallout_ranks=picture.fallout(ranks),
        would_settle=() if slip.certain else (_settles(slip, odd_row),),
        scope=Scope.GROUP,
        next_action=f"Look for a condition around {usual_site or site or 'this call'} under which "
        f"{who} {'leaves' if len(ranks) == 1 else 'leave'} the call out or "
        f"{'repeats' if len(ranks) == 1 else 'repeat'} it; check that all ranks have the same "
        "number of batches.",
    )


_PLURALS = (
    ("its next", "their next"),
    ("it is", "they are"),
    ("it made", "they made"),
    ("it repeated", "they repeated"),
    ("it has ended its loop", "they have ended their loops"),
    ("it has", "they have"),
    ("it still calls", "they still call"),
    ("and stays", "and stay"),
)


def _settles(slip: Slip, row: Any) -> str:
    if row is not None and int(row["step"]) >= 0:
        return f"more than {len(slip.lanes.members)} ranks, or a longer history"
    return "step numbers: call echelon.recorder.step() in the loop"


def _plural(sign: str) -> str:
    for one, many in _PLURALS:
        sign = sign.replace(one, many)
    return sign


def _step(row: Any) -> str:
    return f" in step {int(row['step'])}" if row is not None and int(row["step"]) >= 0 else ""
