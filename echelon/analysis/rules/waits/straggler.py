"""Detect a rank or a host that is repeatedly the last to arrive in a running job.

A straggler is reported as a verdict if it was last in at least 80% of at least 50 collectives of a
group, and if the other ranks spent at least 20% of the time waiting for it. A smaller delay is
reported as a note. Only collectives in which ranks actually waited are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.timing import Arrivals, arrivals
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list, seconds

MIN_COLLECTIVES = 50
LAST_SHARE = 0.8
COST_SHARE = 0.2
MEETING_SHARE = 0.3  # of the larger delays: below it no rank really waited
NOTED_LAST_SHARE = 0.5  # below the verdict: from here on it is noted
NOTED_COST_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Laggards:
    """The members that most often arrived last, and how much time this cost the others."""

    group: str
    ranks: tuple[int, ...]
    host: str  # "": not all ranks of one host
    num_collectives: int
    last_share: float
    cost_share: float
    cost_s: float
    group_size: int

    @property
    def is_straggler(self) -> bool:
        """True if the delay is large enough for a verdict."""
        return self.last_share >= LAST_SHARE and self.cost_share >= COST_SHARE

    @property
    def is_noted(self) -> bool:
        """True if the delay is large enough to be mentioned in the report."""
        return self.last_share >= NOTED_LAST_SHARE and self.cost_share >= NOTED_COST_SHARE


def laggards(found: Arrivals, hosts: list[str]) -> Laggards | None:
    """Return the members that most often arrived last, or None if there were too few collectives.

    The result is a single rank, the ranks of one host, or a few ranks that are late together.

    Args:
        hosts: the host of each member: [num_members].
    """
    spread = found.lag_ns.max(axis=0)
    meeting = spread >= max(1.0, MEETING_SHARE * float(np.percentile(spread, 90)))
    if int(meeting.sum()) < MIN_COLLECTIVES or found.span_s <= 0:
        return None
    lag = found.lag_ns[:, meeting]
    often = int(np.bincount(lag.argmax(axis=0), minlength=len(found.members)).argmax())
    best = _judge(found, lag, (often,), hosts)
    for members in _sets(lag, hosts):
        other = _judge(found, lag, members, hosts)
        if not best.is_straggler and other.is_straggler:
            best = other
    return best


def _sets(lag: npt.NDArray[np.int64], hosts: list[str]) -> Iterator[tuple[int, ...]]:
    """Yield candidate sets of members that are late together.

    Each set contains at most half of the members.
    """
    size = len(hosts)
    median = np.median(lag, axis=1)
    by_host: dict[str, list[int]] = {}
    for member, host in enumerate(hosts):
        by_host.setdefault(host, []).append(member)
    if len(by_host) > 1:
        latest = max(by_host.values(), key=lambda members: float(median[members].min()))
        if 2 * len(latest) <= size:
            yield tuple(latest)
    order = np.argsort(-median, kind="stable")
    gaps = median[order[:-1]] - median[order[1:]]
    if len(gaps):
        number = int(gaps.argmax()) + 1
        if 2 * number <= size:
            yield tuple(sorted(order[:number].tolist()))


def _judge(
    found: Arrivals, lag: npt.NDArray[np.int64], members: tuple[int, ...], hosts: list[str]
) -> Laggards:
    """Measure how much time was lost because a set of members arrived after all others."""
    rest = np.delete(lag, members, axis=0)
    if not len(rest):
        rest = np.zeros_like(lag[:1])
    cost_ns = lag.max(axis=0) - rest.max(axis=0)
    mine = cost_ns > 0
    cost_s = float(cost_ns[mine].sum()) / 1e9
    host = hosts[members[0]]
    is_host = (
        len(members) > 1
        and hosts.count(host) == len(members)
        and all(hosts[member] == host for member in members)
    )
    # A host's ranks may take turns. Other ranks must each be late by themselves: ranks that share
    # too few cores take turns too, and which of them are late is chance.
    shares = [mine] if is_host else [lag[member] > rest.max(axis=0) for member in members]
    return Laggards(
        group=found.group,
        ranks=tuple(sorted(int(found.members[member]) for member in members)),
        host=host if is_host else "",
        num_collectives=lag.shape[1],
        last_share=min(float(share.mean()) for share in shares),
        cost_share=cost_s / found.span_s,
        cost_s=cost_s,
        group_size=len(found.members),
    )


def find_straggler(picture: Picture) -> list[Finding]:
    """Report the ranks that cost the most time, either as a verdict or as a note."""
    candidates = [
        found
        for lanes in picture.lanes
        if (came := arrivals(lanes)) is not None
        and (found := laggards(came, _hosts(picture, came))) is not None
    ]
    noted = [found for found in candidates if found.is_straggler or found.is_noted]
    if not noted:
        return []
    return [
        _describe(picture, max(noted, key=lambda found: (found.is_straggler, found.cost_share)))
    ]


def _hosts(picture: Picture, found: Arrivals) -> list[str]:
    identities = [picture.evidence.ranks[rank].identity for rank in found.members.tolist()]
    return [identity.host or identity.boot_id for identity in identities]


def _describe(picture: Picture, found: Laggards) -> Finding:
    who = rank_list(found.ranks)
    one = len(found.ranks) == 1
    together = "took turns at being last" if found.host else "were each later than all others"
    others = tuple(other for other in picture.evidence.ranks if other not in found.ranks)
    was, whom = ("was the last", f"{who} alone") if one else (together, who)
    of = f", all those of host {found.host}," if found.host else ""
    # torch's stamps are of wall clocks that differ between hosts.
    is_verdict = found.is_straggler and not picture.evidence.foreign
    sure = Confidence.CERTAIN if one else Confidence.LIKELY
    return Finding(
        cause=Cause.STRAGGLER,
        culprit_ranks=found.ranks,
        confidence=sure if is_verdict else Confidence.POSSIBLE,
        group=found.group,
        summary=f"{who}{of} {was} of {found.group_size} in {found.last_share:.0%} of "
        f"{found.num_collectives} collectives of group '{found.group}' and cost "
        f"{found.cost_share:.0%} of the time ({seconds(found.cost_s)})",
        evidence=(
            f"{who} {was} in {found.last_share:.0%} of {found.num_collectives} collectives",
            f"the others waited {seconds(found.cost_s)} for {whom}",
        ),
        fallout_ranks=others if is_verdict else (),
        next_action=f"Compare {'the host' if found.host else 'the data, compute and host'} of "
        f"{who} with the others' (throttling, clocks, garbage collection).",
        info=not is_verdict,
    )
