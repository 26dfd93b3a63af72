"""Ranks that wait for each other in a closed ring: they entered operations in different orders."""

from __future__ import annotations

from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.picture import Picture
from echelon.analysis.rules.stuck import wait_line


def find_desync(picture: Picture) -> list[Finding]:
    """Report the ranks on a closed ring of waits."""
    ring = picture.graph.cycle()
    if not ring:
        return []
    members = set(ring)
    waits = [w for w in picture.graph.waits if members & set(w.waiting) and members & set(w.absent)]
    waits.sort(key=lambda wait: wait.since_ns)
    first = waits[0]
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
            confidence=Confidence.CERTAIN,
            group=first.group,
            operation=first.operation,
            sequence=first.number,
            summary=f"{rank_list(ring)} wait for each other in a ring: {parts}",
            evidence=tuple(wait_line(wait) for wait in waits[:6]),
            fallout_ranks=picture.fallout(ring),
            next_action=f"Call the operations of {what} in the same order on every rank.",
        )
    ]
