"""Detect sends and receives in torch's dumps that can never be matched.

In each direction, the n-th pending send is paired with the n-th pending receive. Messages with
different sizes or dtypes never match. A message without a counterpart is a cause only if its rank
chose the wrong peer, or if the peer is itself waiting for that rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from echelon.analysis.evidence.calls import Call
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.evidence.streams.habit import least_habitual
from echelon.analysis.evidence.streams.streams import Message, Streams
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.analysis.rules.calls.parted import slip_cause
from echelon.analysis.rules.messages.counted import find_miscounted
from echelon.recorder.format.schema import Flag, State


@dataclass(frozen=True, slots=True)
class _Side:
    """A pending send or receive."""

    message: Message
    row: Any
    call: Call
    site: str

    def __str__(self) -> str:
        verb = "sends to" if self.message.is_send else "receives from"
        at = f" at {self.site}" if self.site else ""
        return f"rank {self.message.rank} {verb} rank {self.message.peer}{at}"


def find_messages(picture: Picture) -> list[Finding]:
    """Report messages that can never be matched."""
    streams = picture.streams
    if streams is None or not picture.graph.waits:
        return []
    idle = [rank for rank in picture.graph.sinks if rank not in streams.heads]
    rules = (_unequal,) if idle else (_unequal, _wrong_peer, _left_out, find_miscounted)
    return next((found for rule in rules if (found := rule(picture, streams))), [])


def _side(streams: Streams, message: Message) -> _Side:
    evidence = streams.evidence
    row = evidence.ranks[message.rank].rows[message.row]
    return _Side(message, row, evidence.call(row), short_site(evidence.site(row)))


# ---- pairs that differ ----


def _unequal(picture: Picture, streams: Streams) -> list[Finding]:
    found = []
    for (_, is_send), line in sorted(streams.messages.items()):
        other = streams.counterpart(line[0])
        # A small message leaves its sender at once, so only the receive is pending.
        if other is None or not (is_send or other.is_done):
            continue
        one, its = _side(streams, line[0]), _side(streams, other)
        differs = (
            _numel(one.call) != _numel(its.call)
            or one.call.signature.dtype != its.call.signature.dtype
        )
        if differs and (is_send or _odd_side(streams, one, its) is not None):
            found.append((one, its) if is_send else (its, one))
    if not found:
        return []
    novel = [pair for pair in found if _odd_side(streams, *pair) is not None]
    one, its = (novel or found)[0]
    return [_describe_unequal(picture, one, its, _odd_side(streams, one, its))]


def _numel(call: Call) -> int:
    return sum(prod(shape) for shape in call.signature.shapes)


def _odd_side(streams: Streams, one: _Side, other: _Side) -> _Side | None:
    """Return the side that has never completed the same call with its peer before.

    The result is None if this is true of both sides or of neither.
    """
    known = [_is_known(streams, side) for side in (one, other)]
    if known[0] == known[1]:
        return None
    return other if known[0] else one


def _is_known(streams: Streams, side: _Side) -> bool:
    rows = streams.evidence.ranks[side.message.rank].rows
    same = (rows["call"] == side.row["call"]) & (rows["group"] == side.row["group"])
    same &= (rows["peer"] == side.message.peer) & (rows["state"] == State.COMPLETED)
    same[side.message.row] = False
    return bool(same.any())


def _describe_unequal(picture: Picture, one: _Side, other: _Side, odd: _Side | None) -> Finding:
    sent, received = one.call.signature, other.call.signature
    is_dtype = sent.dtype != received.dtype
    ranks = tuple(sorted((one.message.rank, other.message.rank)))
    culprits = ranks if odd is None else (odd.message.rank,)
    noun = "dtype" if is_dtype else "size"
    lines = [f"{one}: {sent}", f"{other}: {received}"]
    if odd is not None:
        lines.append(f"rank {odd.message.rank} never passed that {noun} to this peer before")
    return Finding(
        cause=Cause.DTYPE_MISMATCH if is_dtype else Cause.SHAPE_MISMATCH,
        culprit_ranks=culprits,
        confidence=Confidence.LIKELY,
        group=picture.evidence.groups[one.message.way[0]].name,
        operation=(odd or one).call.operation,
        summary=f"{one} {sent}, while {other} {received}: the pair never matches",
        evidence=tuple(lines),
        scope=Scope.SHARED,
        fallout_ranks=picture.fallout(culprits),
        would_settle=() if odd is not None else ("what each side passed in earlier steps",),
        next_action=f"Compare the {noun} that {rank_list(ranks)} compute for this exchange.",
    )


# ---- a wrong peer ----


def _lonely(streams: Streams) -> Iterator[Message]:
    """Yield, for each entry of `Streams.messages`, the first message without a counterpart."""
    for line in streams.messages.values():
        for message in line:
            if streams.counterpart(message) is None:
                yield message
                break


def _wrong_peer(picture: Picture, streams: Streams) -> list[Finding]:
    lonely = sorted(_lonely(streams), key=lambda one: (one.rank, one.row))
    wanted: dict[tuple[int, bool], list[Message]] = {}
    for message in lonely:
        wanted.setdefault((message.peer, message.is_send), []).append(message)
    for message in lonely:
        if _is_strange(streams, message):
            return [_describe_wrong(picture, streams, message, None)]
        if message.peer not in streams.heads or not _is_unusual(streams, message):
            continue
        for other in wanted.get((message.rank, not message.is_send), []):
            if other.rank != message.peer and _has_exchanged(streams, other, or_nothing=True):
                return [_describe_wrong(picture, streams, message, other)]
    return []


def _is_unusual(streams: Streams, message: Message) -> bool:
    return _is_novel(streams, message) or _is_novel_here(streams, message)


def _is_novel_here(streams: Streams, message: Message) -> bool:
    """Return whether a message's peer differs from the peers of earlier messages at its call site.

    At least two earlier messages in the same direction must have completed there.
    """
    rows = streams.evidence.ranks[message.rank].rows
    site = int(rows[message.row]["site"])
    alike = _messages(rows, message.way[0]) & (rows["state"] == State.COMPLETED)
    alike &= (rows["site"] == site) & (streams.are_sends(rows) == message.is_send)
    peers = rows["peer"][alike]
    return site != 0 and len(peers) > 1 and not bool((peers == message.peer).any())


def _is_head(streams: Streams, message: Message) -> bool:
    return message.row in streams.heads[message.rank].rows


def _is_strange(streams: Streams, message: Message) -> bool:
    """Return whether a rank is waiting for a peer with which it has never exchanged messages."""
    if message.peer not in streams.heads or not _is_head(streams, message):
        return False
    own, theirs = (streams.evidence.ranks[r].rows for r in (message.rank, message.peer))
    group = message.way[0]
    if bool(_with_peer(theirs, group, message.rank).any()) or not bool(
        _messages(theirs, group).any()
    ):
        return False
    others = own[_messages(own, group) & (own["peer"] != message.peer)]
    alike = int(np.count_nonzero(streams.are_sends(others) == message.is_send))
    return alike > 1 and int(np.count_nonzero(_with_peer(own, group, message.peer))) == 1


def _is_novel(streams: Streams, message: Message) -> bool:
    """Return whether the records show no earlier message of this kind between the two ranks."""
    if _has_exchanged(streams, message):
        return False
    theirs = streams.evidence.ranks[message.peer].rows
    group = message.way[0]
    if streams.is_whole(message.rank, group):
        return True
    facing = theirs[_with_peer(theirs, group, message.rank)]
    return not bool((streams.are_sends(facing) != message.is_send).any())


def _messages(rows: Any, group: int) -> Any:
    return ((rows["flags"] & Flag.P2P) > 0) & (rows["group"] == group)


def _with_peer(rows: Any, group: int, peer: int) -> Any:
    return _messages(rows, group) & (rows["peer"] == peer)


def _has_exchanged(streams: Streams, message: Message, *, or_nothing: bool = False) -> bool:
    """Return whether a rank has completed a message in the same direction with the same peer.

    Args:
        or_nothing: the value to return if the rank has completed no messages with any peer.
    """
    rows = streams.evidence.ranks[message.rank].rows
    done = ((rows["flags"] & Flag.P2P) > 0) & (rows["state"] == State.COMPLETED)
    if not done.any():
        return or_nothing
    mine = done & (rows["peer"] == message.peer) & (rows["group"] == message.way[0])
    return bool((streams.are_sends(rows[mine]) == message.is_send).any())


def _describe_wrong(
    picture: Picture, streams: Streams, message: Message, other: Message | None
) -> Finding:
    one = _side(streams, message)
    beside = () if other is None else (str(_side(streams, other)),)
    is_shown = streams.is_whole(message.rank, message.way[0]) or _is_novel_here(streams, message)
    return Finding(
        cause=Cause.P2P_UNMATCHED,
        culprit_ranks=(message.rank,),
        confidence=Confidence.LIKELY if is_shown or other is None else Confidence.POSSIBLE,
        group=picture.evidence.groups[message.way[0]].name,
        operation=one.call.operation,
        summary=f"{one} for the first time, and rank {message.peer} has posted nothing for it"
        + "".join(f", while {its}" for its in beside),
        evidence=(f"{one}: rank {message.peer} has posted no counterpart", *beside),
        scope=Scope.SHARED,
        fallout_ranks=picture.fallout((message.rank,)),
        would_settle=() if is_shown else ("a longer ring, with the messages of earlier steps",),
        next_action=f"Look at how rank {message.rank} computes its peer for this exchange.",
    )


# ---- a message left out ----


def _left_out(picture: Picture, streams: Streams) -> list[Finding]:
    """Report a pair of ranks that wait for each other because one rank omitted a message."""
    ring = set(picture.graph.cycle())
    waits = [
        message
        for message in sorted(_lonely(streams), key=lambda one: (one.rank, one.row))
        if message.rank in ring and message.peer in ring and _is_head(streams, message)
    ]
    if not waits:
        return []
    short = least_habitual(streams, ring)
    if short not in {message.peer for message in waits}:
        short = None
    if short is None:
        beyond = [m for m in waits if not streams.heads[m.peer].is_message]
        message = (beyond or waits)[0]
        culprits: tuple[int, ...] = tuple(sorted((message.rank, message.peer)))
    else:
        message = next(m for m in waits if m.peer == short)
        culprits = (short,)
    one = _side(streams, message)
    slipped = None if short is None else slip_cause(picture, short)
    return [
        Finding(
            cause=slipped or Cause.P2P_UNMATCHED,
            culprit_ranks=culprits,
            confidence=Confidence.LIKELY if short is not None else Confidence.POSSIBLE,
            group=picture.evidence.groups[message.way[0]].name,
            operation=one.call.operation,
            summary=f"{one}, and rank {message.peer} has continued without the matching call: "
            f"they wait for each other",
            evidence=(
                f"{one}: rank {message.peer} has posted no counterpart",
                f"rank {message.peer} is itself waiting for what rank {message.rank} holds up",
            ),
            scope=Scope.SHARED,
            fallout_ranks=picture.fallout(culprits),
            would_settle=()
            if short is not None
            else (f"how many messages rank {message.peer} sends rank {message.rank} in a step",),
            next_action=f"Count the messages between {rank_list((message.rank, message.peer))} in "
            "one step: every send needs one receive.",
        )
    ]
