"""Compare message counts between ranks that run the same program.

A ring that has wrapped around might no longer show that a rank left out a message, but it still
shows the number of operations. Ranks of one pipeline stage have launched the same number of
operations when they reach a common collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.streams.streams import Place, Streams
from echelon.analysis.finding import Cause, Confidence, Finding, Scope, rank_list
from echelon.recorder.format.schema import Flag

_Counts = Mapping[Place, int]
_LAUNCHES = "p2p_sequence"


@dataclass(frozen=True, slots=True)
class _Difference:
    """A difference between the numbers of messages that two ranks launched before a collective."""

    short: int
    other: int
    place: Place
    counts: tuple[int, int]


def find_miscounted(picture: Picture, streams: Streams) -> list[Finding]:
    """Report a rank that launched more or fewer messages than its peers."""
    counts = {rank: _launches(streams, rank) for rank in streams.evidence.ranks}
    pairs = [pair for members in _stages(streams) for pair in pairwise(members)]
    found = [one for pair in pairs if (one := _compare(counts, *pair)) is not None]
    if not found:
        return []
    odd = set.intersection(*({one.short, one.other} for one in found))
    if len(odd) > 1:  # a single pair: others wait for the rank whose program slipped
        odd = odd & set(picture.graph.sinks) or odd
    if not odd:
        return []
    rank = found[0].short if found[0].short in odd else min(odd)
    return [_describe(picture, streams, found[0], rank, len(odd) == 1)]


def _stages(streams: Streams) -> Iterator[list[int]]:
    """Yield the members of each group whose members do not send messages to each other.

    Members that do not exchange messages with any other rank are omitted.
    """
    talks: dict[int, set[int]] = {}
    for rank, facts in streams.evidence.ranks.items():
        is_message = (facts.rows["flags"] & Flag.P2P) > 0
        talks[rank] = set(facts.rows["peer"][is_message].tolist())
    for group in streams.evidence.groups:
        members = [rank for rank in group.ranks if talks.get(rank)]
        if len(members) > 1 and all(talks[rank].isdisjoint(members) for rank in members):
            yield members


def _launches(streams: Streams, rank: int) -> _Counts:
    """Return how many messages a rank had launched before each recorded collective."""
    rows = streams.evidence.ranks[rank].rows
    is_message = (rows["flags"] & Flag.P2P) > 0
    groups = np.unique(rows["group"][is_message])
    if len(groups) != 1:
        return {}
    is_apart = not bool(((rows["group"] == groups[0]) & (rows["sequence"] >= 0)).any())
    counter = "op_id" if is_apart and bool((rows["op_id"][is_message] > 0).all()) else _LAUNCHES
    first = int(rows[counter][is_message][0]) - 1
    latest = np.maximum.accumulate(np.where(is_message, rows[counter], first))
    listed = np.flatnonzero(rows["sequence"] >= 0)
    places = zip(rows["group"][listed].tolist(), rows["sequence"][listed].tolist(), strict=True)
    return dict(zip(places, latest[listed].tolist(), strict=True))


def _compare(counts: Mapping[int, _Counts], one: int, other: int) -> _Difference | None:
    """Compare two ranks' message counts at the last collective that both ranks recorded."""
    common = counts[one].keys() & counts[other].keys()
    if not common:
        return None
    place = max(common)
    fewer, more = sorted((one, other), key=lambda rank: counts[rank][place])
    if counts[fewer][place] == counts[more][place]:
        return None
    return _Difference(fewer, more, place, (counts[fewer][place], counts[more][place]))


def _describe(
    picture: Picture, streams: Streams, seen: _Difference, rank: int, is_alone: bool
) -> Finding:
    evidence = streams.evidence
    name = evidence.groups[seen.place[0]].name
    at = f"#{seen.place[1]} of group '{name}'"
    fewer, more = seen.counts
    words = "fewer" if rank == seen.short else "more"
    against = seen.other if rank == seen.short else seen.short
    culprits = (rank,)
    return Finding(
        cause=Cause.P2P_UNMATCHED,
        culprit_ranks=culprits,
        confidence=Confidence.LIKELY if is_alone else Confidence.POSSIBLE,
        group=name,
        summary=f"rank {rank} launched {words} sends and receives than rank {against}, which runs "
        f"the same program: {fewer} and {more} when both called {at}; its peers wait for one that "
        "was never sent",
        evidence=(
            f"rank {seen.short}: {fewer} launches of messages before {at}",
            f"rank {seen.other}: {more} launches of messages before {at}",
        ),
        scope=Scope.SHARED,
        fallout_ranks=picture.fallout(culprits),
        would_settle=()
        if is_alone
        else (f"how many messages {rank_list((seen.short, seen.other))} launch in a step",),
        next_action=f"Compare the sends and receives of rank {rank} with those of rank {against}, "
        "step by step.",
    )
