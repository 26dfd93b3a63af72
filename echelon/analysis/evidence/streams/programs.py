"""Compare the sequences of all calls made by ranks that run the same program.

A rank's sequence contains the calls in all groups, including messages. The comparison starts at a
collective that all ranks of a group recorded. Ranks, for example the ranks of one pipeline stage,
are assumed to run the same program if they made the same calls immediately before this collective,
or, failing that, from this collective to the group's next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.streams.habit import in_one_launch
from echelon.analysis.evidence.streams.streams import Streams
from echelon.recorder.format.schema import Flag

_MAX_ROWS = 4096
_MIN_REACH = 4  # calls before the anchor that identify a program


@dataclass(frozen=True, slots=True)
class Parting:
    """The first call at which one rank differs from the other ranks.

    Attributes:
        rank: the rank that differs.
        others: the ranks that agree with each other.
        row: the row of the differing call on `rank`.
        usual: one other rank and its row at the corresponding position, as a pair.
        later: the keys of all calls from that position on, for `rank` and for the other rank.
    """

    rank: int
    others: tuple[int, ...]
    row: int
    usual: tuple[int, int]
    later: tuple[tuple[int, ...], tuple[int, ...]]


def partings(streams: Streams) -> list[Parting]:
    """Return the calls at which individual ranks diverged from the common program.

    Only the largest group in which any rank diverged is considered. Groups with fewer than three
    members are ignored.
    """
    keys = _keys(streams)
    groups = streams.evidence.groups
    order = sorted(range(len(groups)), key=lambda number: (-len(groups[number].ranks), number))
    for group in order:
        if len(groups[group].ranks) < 3:  # of two ranks, neither is odd
            break
        found = list(_in_group(streams, group, keys))
        if found:
            return found
    return []


def _keys(streams: Streams) -> Mapping[int, npt.NDArray[np.int64]]:
    """Return each rank's calls as numbers; equivalent calls have equal numbers.

    A call is identified by its group's name, its operation, its call site and, for a message, the
    distance to the peer.
    """
    evidence = streams.evidence
    names = {name: number for number, name in enumerate(sorted({g.name for g in evidence.groups}))}
    by_group = np.array([names[group.name] for group in evidence.groups] + [0], np.int64)
    operations: dict[str, int] = {}
    by_call = np.array(
        [operations.setdefault(c.operation, len(operations)) for c in evidence.tables.calls] + [0],
        np.int64,
    )
    sizes = (len(operations) + 1, len(evidence.tables.texts) + 1, evidence.world_size + 2, 2)
    keys: dict[int, npt.NDArray[np.int64]] = {}
    for rank, facts in evidence.ranks.items():
        rows = facts.rows[-_MAX_ROWS:]
        is_message = (rows["flags"] & Flag.P2P) > 0
        away = np.zeros(len(rows), np.int64)
        for group in np.unique(rows["group"][is_message]).tolist():
            mine = is_message & (rows["group"] == group)
            away[mine] = _steps_away(evidence.groups[group].ranks, rank, rows["peer"][mine])
        key = by_group[rows["group"]]
        fields = (by_call[rows["call"]], rows["site"].astype(np.int64), away, in_one_launch(rows))
        for size, field in zip(sizes, fields, strict=True):
            key = key * size + field  # may wrap around in absurd worlds, alike on all ranks
        keys[rank] = key
    return keys


def _steps_away(
    ranks: Sequence[int], rank: int, peers: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Return each peer's cyclic distance from a rank within a group, plus 1."""
    order = np.argsort(np.array(ranks))
    places = order[np.searchsorted(np.array(ranks), peers, sorter=order) % len(ranks)]
    own = ranks.index(rank) if rank in ranks else 0
    return np.asarray((places - own) % len(ranks) + 1, np.int64)


def _in_group(
    streams: Streams, group: int, keys: Mapping[int, npt.NDArray[np.int64]]
) -> Iterator[Parting]:
    """Yield the points at which the programs of a group's ranks diverge."""
    starts: dict[int, dict[int, int]] = {}
    for rank in streams.evidence.groups[group].ranks:
        facts = streams.evidence.ranks.get(rank)
        if facts is None:
            continue
        rows = facts.rows[-_MAX_ROWS:]
        mine = np.flatnonzero((rows["group"] == group) & (rows["sequence"] >= 0))
        if len(mine) > 1:
            numbers = rows["sequence"][mine].tolist()
            starts[rank] = dict(zip(numbers, mine.tolist(), strict=True))
    if len(starts) < 2:
        return
    first = max(min(numbers) for numbers in starts.values())
    anchors = {rank: numbers[first] for rank, numbers in starts.items() if first in numbers}
    ends = {rank: starts[rank][first + 1] for rank in anchors if first + 1 in starts[rank]}
    # Calls before the anchor identify programs; in rings that have wrapped, those after it do.
    reach = min(anchors.values(), default=0)
    before = {rank: (place - reach, place + 1) for rank, place in anchors.items()}
    after = {rank: (anchors[rank], end) for rank, end in ends.items()}
    for spans in (before if reach >= _MIN_REACH else {}, after):
        found = [one for alike in _alike(keys, spans) if (one := _parting(streams, alike, keys))]
        if found:
            yield from found
            return


def _alike(
    keys: Mapping[int, npt.NDArray[np.int64]], spans: Mapping[int, tuple[int, int]]
) -> Iterator[dict[int, int]]:
    """Yield sets of ranks that made the same calls within the given index ranges.

    Each set is a dict that maps each rank to the start of its index range.
    """
    programs: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, (begin, end) in spans.items():
        programs.setdefault(tuple(keys[rank][begin:end].tolist()), {})[rank] = begin
    yield from programs.values()


def _parting(
    streams: Streams, starts: Mapping[int, int], keys: Mapping[int, npt.NDArray[np.int64]]
) -> Parting | None:
    """Return the first call at which a single rank differs from its peers, or None."""
    if len(starts) < 2:
        return None
    lines = {rank: keys[rank][start:] for rank, start in starts.items()}
    place = _first_difference(list(lines.values()))
    if place is None:
        return None
    called = {rank: int(line[place]) for rank, line in lines.items() if len(line) > place}
    counts = Counter(called.values()).most_common()
    odd = [rank for rank, key in called.items() if key != counts[0][0]]
    if len(counts) != 2 or (counts[0][1] == 1 or counts[0][1] == counts[1][1]):
        if len(called) == 2 and not _are_replicas(streams, list(called)):
            return None
        odd = [rank for rank in called if _is_novel(lines[rank], place)]
    if len(odd) != 1 or len(counts) != 2:
        return None
    others = tuple(rank for rank, key in called.items() if key != called[odd[0]])
    if called[others[0]] not in lines[others[0]][:place]:
        return None  # no rank called it before: the programs may differ here on purpose
    skip = {rank: len(streams.evidence.ranks[rank].rows) - len(keys[rank]) for rank in called}
    longest = max(others, key=lambda rank: len(lines[rank]))
    return Parting(
        rank=odd[0],
        others=others,
        row=skip[odd[0]] + starts[odd[0]] + place,
        usual=(longest, skip[longest] + starts[longest] + place),
        later=(tuple(lines[odd[0]][place:].tolist()), tuple(lines[longest][place:].tolist())),
    )


def _are_replicas(streams: Streams, ranks: Sequence[int]) -> bool:
    """Return whether at least two groups with different members contain both ranks."""
    shared = [g.ranks for g in streams.evidence.groups if set(ranks) <= set(g.ranks)]
    return len({frozenset(one) for one in shared}) > 1


def _first_difference(lines: Sequence[npt.NDArray[np.int64]]) -> int | None:
    """Return the first position at which the sequences differ, or None."""
    found: list[int] = []
    usual = max(lines, key=len)
    for line in lines:
        differs = np.flatnonzero(line != usual[: len(line)])
        found += differs[:1].tolist()
    return min(found, default=None)


def _is_novel(line: npt.NDArray[np.int64], place: int) -> bool:
    """Return whether the call at `place` is new in its context, the calls just before it.

    This is the case if the same context has occurred earlier, but was always followed by another
    call.
    """
    keys = line.tolist()
    for length in (8, 4, 2, 1):
        context = keys[max(0, place - length) : place]
        after = [
            keys[at + len(context)]
            for at in range(place - len(context))
            if keys[at : at + len(context)] == context
        ]
        if len(context) == length and after:
            return keys[place] not in after
    return False
