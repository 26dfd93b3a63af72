"""Build the wait-for graph from torch's dumps (see `streams.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.analysis.evidence.matching.waits import Wait, WaitGraph
from echelon.analysis.evidence.streams.streams import ROOTED, Head, Streams


def stream_graph(streams: Streams) -> WaitGraph:
    """Return the wait-for graph; it is empty if the job made progress and there was no incident."""
    evidence = streams.evidence
    if streams.is_moving and not evidence.incident.kind:
        return WaitGraph(())
    places: dict[tuple[int, int], list[Head]] = {}
    waits: list[Wait] = []
    for head in streams.heads.values():
        if head.is_message:
            waits += _message_waits(streams, head)
        else:
            places.setdefault((head.group, head.sequence), []).append(head)
    waits += [_collective_wait(streams, place, heads) for place, heads in sorted(places.items())]
    return WaitGraph(tuple(waits))


def _collective_wait(streams: Streams, place: tuple[int, int], heads: list[Head]) -> Wait:
    evidence = streams.evidence
    group = evidence.groups[place[0]]
    waiting = tuple(sorted(head.rank for head in heads))
    others = [rank for rank in group.ranks if rank not in set(waiting)]
    completed = tuple(rank for rank in others if streams.has_completed(rank, place))
    through = set(completed)
    rows = [evidence.ranks[head.rank].rows[head.rows[0]] for head in heads]
    names = [evidence.call(row).operation for row in rows]
    is_vague = place[0] in evidence.vague_groups
    if is_vague and not others:
        others = silent_ranks(streams)
    is_proven = any(name not in ROOTED for name in names) and bool(completed)
    return Wait(
        group=group.name,
        operation=max(sorted(set(names)), key=names.count),
        sequence=place[1],
        waiting=waiting,
        absent=() if is_proven else tuple(sorted(r for r in others if r not in through)),
        since_ns=min(int(row["created_ns"]) for row in rows),
        completed=tuple(sorted(completed)),
        members=len(group.ranks),
        vague=is_vague,
        gave_up=any(evidence.error(row) for row in rows),
    )


def silent_ranks(streams: Streams) -> list[int]:
    """Return the ranks whose dumps do not list any operations."""
    return [rank for rank, facts in streams.evidence.ranks.items() if not len(facts.rows)]


def _message_waits(streams: Streams, head: Head) -> Iterator[Wait]:
    """Yield one wait for each message at the head of a rank's queue."""
    evidence = streams.evidence
    rows = evidence.ranks[head.rank].rows
    for index in head.rows:
        message = streams.message(head.rank, index)
        if message is None or message.peer == head.rank:
            continue
        other = streams.counterpart(message)
        there = None if other is None else streams.heads.get(other.rank)
        met = other is not None and (
            other.is_done or (there is not None and other.row in there.rows)
        )
        row = rows[index]
        yield Wait(
            group=evidence.groups[head.group].name,
            operation=evidence.call(row).operation,
            sequence=int(row["p2p_sequence"]),
            waiting=(head.rank,),
            absent=() if met else (message.peer,),
            since_ns=int(row["created_ns"]),
            is_p2p=True,
            peer=message.peer,
            members=2,
        )
