"""Trace the waits in a hung pipeline to the rank that causes them.

Pending messages do not show which rank is waiting for which, because a pipeline posts receives
ahead of time. Therefore the waits are taken from open spans. A waiting rank has a `pipeline` span
such as `2F3 waits in RECV_F for 1F3 of rank 1`, and a computing rank has a `compute` span.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.analysis.evidence.model import RankEvidence, Span
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.finding import Cause, Finding, rank_list
from echelon.analysis.rules.one_rank.choice import read_rank
from echelon.analysis.rules.one_rank.reading import Reading
from echelon.recorder.format.schema import Flag, State

_WAIT = re.compile(r"([^\n]{1,80}) waits in (\w{1,12}) for (?:(\w{1,20}) of )?rank (\d{1,7})")
_ACTION = re.compile(r"\d{1,6}[FBIW]\d{1,6}")


@dataclass(frozen=True, slots=True)
class _Wait:
    """One rank's wait for another rank in a pipeline."""

    rank: int
    action: str  # its own action, which cannot continue
    way: str  # RECV_F, RECV_B, SEND
    thing: str  # the other rank's action that it waits for; "": for its receive
    peer: int
    span: Span

    def __str__(self) -> str:
        wanted = f"{self.thing} of rank {self.peer}" if self.thing else f"rank {self.peer}"
        return f"rank {self.rank}: {self.action} waits in {self.way} for {wanted}"


def find_pipeline(picture: Picture) -> list[Finding]:
    """Report the ranks that hold up a pipeline, longest wait first."""
    waits = {
        rank: wait
        for rank, facts in picture.evidence.ranks.items()
        if (wait := _wait_of(picture, facts)) is not None
    }
    roots: dict[int, list[_Wait]] = {}
    for wait in sorted(waits.values(), key=lambda wait: wait.span.started_ns):
        root = _follow(picture, waits, wait)
        if root is not None:
            roots.setdefault(root, []).append(wait)
    return [_describe(picture, root, waiting) for root, waiting in roots.items()]


def _wait_of(picture: Picture, facts: RankEvidence) -> _Wait | None:
    for span in facts.open_spans:
        found = _WAIT.fullmatch(span.detail) if span.name == "pipeline" else None
        if found is None or int(found[4]) >= picture.evidence.world_size:
            continue
        if picture.is_in_flight(max(0, facts.seen_ns - span.started_ns) / 1e9):
            continue
        return _Wait(facts.rank, found[1], found[2], found[3] or "", int(found[4]), span)
    return None


def _follow(picture: Picture, waits: dict[int, _Wait], wait: _Wait) -> int | None:
    """Return the rank that ultimately causes a wait; None for a cycle or a transport fault."""
    seen = {wait.rank}
    rank = wait.peer
    while rank not in seen:
        seen.add(rank)
        if rank in waits:
            rank = waits[rank].peer
            continue
        inside = [w for w in picture.graph.waits if rank in w.waiting and not w.is_p2p]
        if not inside:
            return rank
        if not inside[0].absent:
            return None  # the cause is in the transport or a device
        rank = inside[0].absent[0]
    return None


def _describe(picture: Picture, root: int, waiting: list[_Wait]) -> Finding:
    facts = picture.evidence.ranks.get(root)
    reading = read_rank(picture, root)
    direct = [wait for wait in waiting if wait.peer == root] or waiting
    first = next((wait for wait in direct if _is_for(wait, facts)), direct[0])
    what = f"never ran {first.thing}" if first.thing else f"never received from rank {first.rank}"
    if first.peer != root:
        what = f"holds up {first.thing or 'a receive'} of rank {first.peer}"
    ranks = tuple(sorted(wait.rank for wait in waiting))
    others = tuple(rank for rank in _fallout(picture, root, ranks) if rank != first.rank)
    rest = f", {rank_list(others)} {'is' if len(others) == 1 else 'are'} fallout" if others else ""
    summary = (
        f"rank {root} {what}: it {_doing(facts, reading)}; "
        f"rank {first.rank} waits in {first.way}{rest}"
    )
    at = f" at {reading.frame}" if reading.frame else ""
    return Finding(
        cause=reading.cause,
        culprit_ranks=(root,),
        confidence=reading.confidence,
        group=_group(picture, first),
        operation="recv" if first.way.startswith("RECV") else "send",
        summary=summary,
        evidence=(*_in_action(facts), *reading.evidence, *(str(wait) for wait in waiting)),
        fallout_ranks=_fallout(picture, root, ranks),
        would_settle=reading.would_settle,
        next_action=f"Look at what rank {root} does{at}: the whole pipeline waits for it.",
    )


def _is_for(wait: _Wait, facts: RankEvidence | None) -> bool:
    """Return whether a rank is executing the action that another rank is waiting for."""
    span = None if facts is None else _computing(facts)
    return span is not None and wait.thing == span.detail.replace("I", "B")


def _doing(facts: RankEvidence | None, reading: Reading) -> str:
    span = None if facts is None else _computing(facts)
    if span is None or reading.cause not in (Cause.HOST_HANG, Cause.UNKNOWN):
        return reading.words
    where = f" at {reading.frame}" if reading.frame else ""
    return f"is in compute{where}, in {span.detail}"


def _in_action(facts: RankEvidence | None) -> tuple[str, ...]:
    span = None if facts is None else _computing(facts)
    if facts is None or span is None:
        return ()
    age_s = max(0, facts.seen_ns - span.started_ns) / 1e9
    return (f"rank {facts.rank}: has been computing {span.detail} for {age_s:.1f} s",)


def _computing(facts: RankEvidence) -> Span | None:
    spans = [span for span in facts.open_spans if span.name == "compute"]
    return next((span for span in spans if _ACTION.fullmatch(span.detail)), None)


def _fallout(picture: Picture, root: int, waiting: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*waiting, *picture.fallout([root])} - {root}))


def _group(picture: Picture, wait: _Wait) -> str | None:
    """Return the name of the group in which a rank is waiting for a message."""
    rows = picture.evidence.ranks[wait.rank].rows
    pending = (rows["state"] == State.CREATED) | (rows["state"] == State.STARTED)
    mine = rows[((rows["flags"] & Flag.P2P) > 0) & (rows["peer"] == wait.peer) & pending]
    return picture.evidence.groups[int(mine[0]["group"])].name if len(mine) else None
