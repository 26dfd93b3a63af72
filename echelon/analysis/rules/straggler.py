"""Nothing stalls, but one rank is last again and again.

It is a verdict only where it matters: last in at least 80 % of at least 50 collectives of a group,
and at least 20 % of the time goes into waiting for it. Below that it is worth a line.

Only meetings count: collectives in which somebody really waited. Of four buckets that follow each
other, the first takes up the slow rank's delay, and who is last in the other three is chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.analysis.finding import Cause, Confidence, Finding, seconds
from echelon.analysis.picture import Picture
from echelon.analysis.timing import Arrivals, arrivals

MIN_COLLECTIVES = 50
LAST_SHARE = 0.8
COST_SHARE = 0.2
MEETING_SHARE = 0.3  # of the larger delays: below it nobody really waited
NOTED_LAST_SHARE = 0.5  # below the verdict: what is still worth a line
NOTED_COST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Laggard:
    """The member that came last most often, and what that cost."""

    group: str
    rank: int
    num_collectives: int
    last_share: float
    cost_share: float
    cost_s: float
    group_size: int

    @property
    def is_straggler(self) -> bool:
        """Whether it is a verdict."""
        return self.last_share >= LAST_SHARE and self.cost_share >= COST_SHARE

    @property
    def is_noted(self) -> bool:
        """Whether it is worth a line."""
        return self.last_share >= NOTED_LAST_SHARE and self.cost_share >= NOTED_COST_SHARE


def laggard(found: Arrivals) -> Laggard | None:
    """Return who was last most often, None if there are too few collectives to say."""
    spread = found.lag_ns.max(axis=0)
    meeting = spread >= max(1.0, MEETING_SHARE * float(np.percentile(spread, 90)))
    count = int(meeting.sum())
    if count < MIN_COLLECTIVES or found.span_s <= 0:
        return None
    last, cost_ns = found.last[meeting], found.cost_ns[meeting]
    often = int(np.bincount(last, minlength=len(found.members)).argmax())
    mine = last == often
    cost_s = float(cost_ns[mine].sum()) / 1e9
    return Laggard(
        group=found.group,
        rank=int(found.members[often]),
        num_collectives=count,
        last_share=float(mine.mean()),
        cost_share=cost_s / found.span_s,
        cost_s=cost_s,
        group_size=len(found.members),
    )


def find_straggler(picture: Picture) -> list[Finding]:
    """Report the rank that costs most, as a verdict or as a note."""
    candidates = [
        found
        for lanes in picture.lanes
        if (came := arrivals(lanes)) is not None and (found := laggard(came)) is not None
    ]
    noted = [found for found in candidates if found.is_straggler or found.is_noted]
    if not noted:
        return []
    return [
        _describe(picture, max(noted, key=lambda found: (found.is_straggler, found.cost_share)))
    ]


def _describe(picture: Picture, found: Laggard) -> Finding:
    rank = found.rank
    others = tuple(other for other in picture.evidence.ranks if other != rank)
    return Finding(
        cause=Cause.STRAGGLER,
        culprit_ranks=(rank,),
        confidence=Confidence.CERTAIN if found.is_straggler else Confidence.POSSIBLE,
        group=found.group,
        summary=f"rank {rank} was the last of {found.group_size} in {found.last_share:.0%} of "
        f"{found.num_collectives} meetings of group '{found.group}' and cost "
        f"{found.cost_share:.0%} of the time ({seconds(found.cost_s)})",
        evidence=(
            f"rank {rank} was last in {found.last_share:.0%} of {found.num_collectives} meetings",
            f"the others waited {seconds(found.cost_s)} for rank {rank} alone",
        ),
        fallout_ranks=others if found.is_straggler else (),
        next_action=f"Compare rank {rank}'s data, compute and host (throttling, garbage "
        "collection) with another rank's.",
        info=not found.is_straggler,
    )
