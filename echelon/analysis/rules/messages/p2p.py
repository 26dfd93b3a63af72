"""Detect sends and receives without a counterpart.

If rank 0 posts an operation for rank 1 while rank 2 posts an operation for rank 0, rank 0 has
chosen the wrong peer. A receive can never be matched if its peer is itself waiting for the
receiver. In this case, either the receive is superfluous or a send is missing. The earlier messages
between the two ranks show which is the case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.analysis.evidence.model import Evidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list


@dataclass(frozen=True, slots=True)
class Posted:
    """A pending send or receive."""

    rank: int
    peer: int
    is_send: bool
    row: Any
    answered: bool

    def words(self, evidence: Evidence) -> str:
        """Describe the operation: `rank 1 receives from rank 2 at train.py:13 in step`."""
        site = short_site(evidence.site(self.row))
        verb = "sends to" if self.is_send else "receives from"
        return f"rank {self.rank} {verb} rank {self.peer}" + (f" at {site}" if site else "")


class _Pending:
    """All pending sends and receives, both as a list and grouped by (rank, peer)."""

    def __init__(self, picture: Picture) -> None:
        exchanges = picture.exchanges
        self.all = [
            Posted(
                rank,
                int(row["peer"]),
                exchanges.is_send(row),
                row,
                exchanges.is_answered(rank, row),
            )
            for rank, rows in exchanges.pending.items()
            for row in rows
        ]
        self._by_pair: dict[tuple[int, int], list[Posted]] = {}
        self._lonely_for: dict[tuple[int, bool], list[Posted]] = {}
        for one in self.all:
            self._by_pair.setdefault((one.rank, one.peer), []).append(one)
            if not one.answered:
                self._lonely_for.setdefault((one.peer, one.is_send), []).append(one)

    def facing(self, one: Posted) -> list[Posted]:
        """Return the pending operations that the peer of `one` has posted for the rank of `one`."""
        return self._by_pair.get((one.peer, one.rank), [])

    def lonely_for(self, one: Posted) -> list[Posted]:
        """Return other ranks' unmatched operations that could be the counterpart of `one`."""
        return self._lonely_for.get((one.rank, not one.is_send), [])


def find_unmatched(picture: Picture) -> list[Finding]:
    """Report sends and receives that can never be matched."""
    if picture.streams is not None:
        return []  # torch's dumps: `messages.py`
    if not any(wait.is_p2p for wait in picture.graph.waits):
        return []
    pending = _Pending(picture)
    rules = (_wrong_peer, _unequal_pair, _novel, _stray)
    return next((found for rule in rules if (found := rule(picture, pending))), [])


def _wrong_peer(picture: Picture, pending: _Pending) -> list[Finding]:
    for one in pending.all:
        if one.answered or pending.facing(one):
            continue
        for other in pending.lonely_for(one):
            if other.rank != one.peer:
                why = f"while {other.words(picture.evidence)}"
                return [_describe(picture, one, (one.rank,), why, (other,), Confidence.CERTAIN)]
    return []


def _pairs(pending: _Pending) -> Iterator[tuple[Posted, Posted]]:
    """Yield pairs of pending sends and receives that should match."""
    for one in pending.all:
        if not one.is_send or one.row["p2p_sequence"] < 0:
            continue
        for other in pending.facing(one):
            same = one.row["group"] == other.row["group"]
            same &= one.row["p2p_sequence"] == other.row["p2p_sequence"]
            if same and not other.is_send:
                yield one, other


def _unequal_pair(picture: Picture, pending: _Pending) -> list[Finding]:
    """Report a send and the matching receive if they differ in tag, dtype or size."""
    evidence = picture.evidence
    for one, other in _pairs(pending):
        ranks = tuple(sorted((one.rank, other.rank)))
        sent, received = evidence.call(one.row).signature, evidence.call(other.row).signature
        tags = (int(one.row["tag"]), int(other.row["tag"]))
        if sent != received and not evidence.foreign:
            cause = Cause.DTYPE_MISMATCH if sent.dtype != received.dtype else Cause.SHAPE_MISMATCH
            why = f"{sent}, while {other.words(evidence)} {received}"
        elif min(tags) >= 0 and tags[0] != tags[1]:
            cause = Cause.P2P_UNMATCHED
            why = f"with tag {tags[0]}, while {other.words(evidence)} with tag {tags[1]}"
        else:
            continue
        finding = _describe(picture, one, ranks, why, (other,), Confidence.LIKELY)
        return [finding.changed(cause=cause, evidence=(*finding.evidence[1:], finding.summary))]
    return []


def _novel(picture: Picture, pending: _Pending) -> list[Finding]:
    """Report one of two ranks that both send to, or both receive from, each other."""
    for one in pending.all:
        for other in pending.facing(one):
            if one.answered or other.answered or one.is_send != other.is_send:
                continue
            why = _without_reason(picture, one, other)
            if why:
                unheard = picture.exchanges.unheard(one.rank)
                lines = [
                    f"rank {q} sent to rank {one.rank}, which has not received it" for q in unheard
                ]
                sure = Confidence.CERTAIN if unheard else Confidence.LIKELY
                finding = _describe(picture, one, (one.rank,), why, (other,), sure)
                return [finding.changed(evidence=(*finding.evidence, *lines))]
    return []


def _without_reason(picture: Picture, one: Posted, other: Posted) -> str:
    """Explain what makes `one` unusual if `other` is not; return "" if nothing does."""
    evidence, exchanges = picture.evidence, picture.exchanges
    before, others_before = (exchanges.has_done(p.rank, p.row) for p in (one, other))
    if others_before and not before:
        return f"for the first time, while {other.words(evidence)}, as in earlier steps"
    if before == others_before and not exchanges.unheard(other.rank):
        unheard = exchanges.unheard(one.rank)
        if unheard and not one.is_send:
            return f"while {rank_list(unheard)} sent to it, and {other.words(evidence)}"
    return ""


def _stray(picture: Picture, pending: _Pending) -> list[Finding]:
    for one in pending.all:
        if one.answered or one.peer not in picture.graph.blocked:
            continue
        ring_wait = next(
            (
                w
                for w in picture.graph.waits_for([one.rank])
                if one.peer in w.waiting and not w.is_p2p
            ),
            None,
        )
        if ring_wait is None:
            continue
        culprit = one.peer if picture.exchanges.has_done(one.rank, one.row) else one.rank
        why = f"while rank {one.peer} waits for it in {ring_wait} of group '{ring_wait.group}'"
        return [_describe(picture, one, (culprit,), why, (), Confidence.LIKELY)]
    return []


def _describe(
    picture: Picture,
    one: Posted,
    culprits: tuple[int, ...],
    why: str,
    others: tuple[Posted, ...],
    confidence: Confidence,
) -> Finding:
    evidence = picture.evidence
    number = int(one.row["p2p_sequence"])
    lines = [f"{one.words(evidence)}: rank {one.peer} has posted no counterpart"]
    lines += [other.words(evidence) for other in others]
    if culprits == (one.peer,):
        lines.append(f"rank {one.peer} answered rank {one.rank} here before, but not this time")
    return Finding(
        cause=Cause.P2P_UNMATCHED,
        culprit_ranks=culprits,
        confidence=confidence,
        group=evidence.groups[int(one.row["group"])].name,
        operation=evidence.call(one.row).operation,
        sequence=number if number >= 0 else None,
        summary=f"{one.words(evidence)}, {why}",
        evidence=tuple(lines),
        fallout_ranks=picture.fallout(culprits),
        next_action=f"Compare the peers that {rank_list(culprits)} and the other side compute for "
        "this exchange: every send needs one receive of the same pair and tag.",
    )
