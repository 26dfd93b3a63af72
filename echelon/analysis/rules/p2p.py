"""Sends and receives without a counterpart.

A rank that posted for one peer while another peer posted for it chose the wrong peer. A receive
whose peer has gone on to wait for the receiver elsewhere will never be answered; whether it is one
too many or the send was left out is told by whether this pair ever exchanged anything before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.analysis.evidence import Evidence
from echelon.analysis.finding import Cause, Confidence, Finding, rank_list
from echelon.analysis.picture import Picture
from echelon.analysis.stacks import short_site
from echelon.analysis.waits import SENDS, first_pending_p2p, has_counterpart
from echelon.recorder.schema import Flag


@dataclass(frozen=True, slots=True)
class Posted:
    """A pending send or receive."""

    rank: int
    peer: int
    is_send: bool
    row: Any
    answered: bool

    def words(self, evidence: Evidence) -> str:
        """Describe it: `rank 1 receives from rank 2 at train.py:13 in step`."""
        site = short_site(evidence.site(self.row))
        verb = "sends to" if self.is_send else "receives from"
        return f"rank {self.rank} {verb} rank {self.peer}" + (f" at {site}" if site else "")


def find_unmatched(picture: Picture) -> list[Finding]:
    """Report sends and receives that can never be matched."""
    if picture.streams is not None:
        return []  # torch's dumps: `messages.py`
    pending = list(_pending(picture))
    rules = (_wrong_peer, _unequal_pair, _novel, _stray)
    return next((found for rule in rules if (found := rule(picture, pending))), [])


def _pending(picture: Picture) -> Iterator[Posted]:
    evidence = picture.evidence
    if not any(wait.is_p2p for wait in picture.graph.waits):
        return
    for rank, facts in evidence.ranks.items():
        for row in first_pending_p2p(evidence, facts):
            is_send = evidence.call(row).operation in SENDS
            yield Posted(rank, int(row["peer"]), is_send, row, has_counterpart(evidence, rank, row))


def _wrong_peer(picture: Picture, pending: list[Posted]) -> list[Finding]:
    lonely = [one for one in pending if not one.answered]
    for one in lonely:
        for other in lonely:
            wants_it = other.peer == one.rank and other.is_send != one.is_send
            if wants_it and other.rank != one.peer and _peer_is_elsewhere(pending, one):
                why = f"while {other.words(picture.evidence)}"
                return [_describe(picture, one, (one.rank,), why, (other,), Confidence.CERTAIN)]
    return []


def _peer_is_elsewhere(pending: list[Posted], one: Posted) -> bool:
    """Tell whether the peer has no p2p with this rank pending at all, of either way."""
    return not any(p.rank == one.peer and p.peer == one.rank for p in pending)


def _pairs(pending: list[Posted]) -> Iterator[tuple[Posted, Posted]]:
    """Yield the sends and receives that were meant for each other, both still pending."""
    for one in pending:
        for other in pending:
            facing = one.peer == other.rank and other.peer == one.rank
            same = one.row["group"] == other.row["group"]
            same &= one.row["p2p_sequence"] == other.row["p2p_sequence"]
            if (
                one.is_send
                and not other.is_send
                and facing
                and same
                and one.row["p2p_sequence"] >= 0
            ):
                yield one, other


def _unequal_pair(picture: Picture, pending: list[Posted]) -> list[Finding]:
    """A send and its receive that differ in tag, type or size: both sides are named."""
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


def _novel(picture: Picture, pending: list[Posted]) -> list[Finding]:
    """Two ranks receive from each other, and one of them has no reason to."""
    for one in pending:
        for other in pending:
            facing = one.peer == other.rank and other.peer == one.rank
            if not facing or one.answered or other.answered or one.is_send != other.is_send:
                continue
            why = _without_reason(picture.evidence, one, other)
            if why:
                unheard = senders_unheard(picture.evidence, one)
                lines = [
                    f"rank {q} sent to rank {one.rank}, which has not received it" for q in unheard
                ]
                sure = Confidence.CERTAIN if unheard else Confidence.LIKELY
                finding = _describe(picture, one, (one.rank,), why, (other,), sure)
                return [finding.changed(evidence=(*finding.evidence, *lines))]
    return []


def _without_reason(evidence: Evidence, one: Posted, other: Posted) -> str:
    """Say why `one` and not `other` is odd, "" if it is not: its past, or whom it does not hear."""
    before, others_before = exchanged_before(evidence, one), exchanged_before(evidence, other)
    if others_before and not before:
        return f"as never before, while {other.words(evidence)}, as always"
    if before == others_before and not senders_unheard(evidence, other):
        unheard = senders_unheard(evidence, one)
        if unheard and not one.is_send:
            return f"while {rank_list(unheard)} sent to it, and {other.words(evidence)}"
    return ""


def senders_unheard(evidence: Evidence, one: Posted) -> list[int]:
    """Return the ranks that sent this rank more than it has received from them."""
    mine = evidence.ranks[one.rank].rows
    found: list[int] = []
    for rank, facts in evidence.ranks.items():
        rows = facts.rows
        if rank == one.rank or not len(rows):
            continue
        sent = _latest_number(evidence, rows, one.rank, is_send=True)
        if sent > _latest_number(evidence, mine, rank, is_send=False):
            found.append(rank)
    return found


def _latest_number(evidence: Evidence, rows: Any, peer: int, *, is_send: bool) -> int:
    """Return the highest pair number of this way between a rank's rows and a peer; -1 if none."""
    numbers = [
        int(row["p2p_sequence"])
        for row in rows[(rows["flags"] & Flag.P2P > 0) & (rows["peer"] == peer)]
        if (evidence.call(row).operation in SENDS) == is_send
    ]
    return max(numbers, default=-1)


def _stray(picture: Picture, pending: list[Posted]) -> list[Finding]:
    for one in pending:
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
        culprit = one.peer if exchanged_before(picture.evidence, one) else one.rank
        why = f"while rank {one.peer} waits for it in {ring_wait} of group '{ring_wait.group}'"
        return [_describe(picture, one, (culprit,), why, (), Confidence.LIKELY)]
    return []


def exchanged_before(evidence: Evidence, one: Posted) -> bool:
    """Tell whether this rank finished an operation of this kind with this peer before."""
    rows = evidence.ranks[one.rank].rows
    mask = (rows["flags"] & Flag.P2P > 0) & (rows["peer"] == one.peer) & (rows["ended_ns"] > 0)
    mask &= rows["call"] == one.row["call"]
    return bool(mask.any())


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
        lines.append(f"rank {one.peer} answered rank {one.rank} here before, and not this time")
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
