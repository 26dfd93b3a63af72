"""Build the timeline: the last operations and spans of every rank, encoded as integers.

Times are in microseconds since a common start. The total number of boxes (drawn operations and
spans) is limited, so the larger the world, the fewer operations are shown per rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.stacks.frames import short_site
from echelon.analysis.report.clean import clean
from echelon.recorder.format.schema import Flag, State

MAX_BOXES = 60_000
_FEWEST = 12  # operations per rank, for any number of ranks
_MOST = 2000


def timeline(picture: Picture) -> dict[str, Any]:
    """Return the data for the page: the kinds of boxes, and flat lists of numbers for each rank.

    An operation is encoded as start, length, kind, sequence and state. A span is encoded as start,
    length and name. The length is -1 if the operation or span has not ended.
    """
    ranks = list(picture.whole.ranks.values())
    share = max(_FEWEST, min(_MOST, MAX_BOXES // max(1, len(ranks))))
    kept = {facts.rank: facts.rows[-share:] for facts in ranks}
    begin = _begin(list(kept.values()))
    kinds = _Kinds(picture)
    rows = [
        {
            "rank": facts.rank,
            "ops": _operations(kept[facts.rank], begin, kinds),
            "spans": _spans(picture, facts, begin, share // 2, kinds),
        }
        for facts in ranks
    ]
    end = _end(ranks, list(kept.values()), begin)
    return {
        "end": max(1, (end - begin) // 1000),
        "stall": _stall(picture, begin),
        "kinds": kinds.shown,
        "names": kinds.names,
        "rows": rows,
    }


class _Kinds:
    """The numbered kinds of boxes in the timeline.

    Each combination of call, group, site and peer is one kind.
    """

    def __init__(self, picture: Picture) -> None:
        self.shown: list[dict[str, str]] = []
        self.names: list[str] = []
        self._picture = picture
        self._index: dict[tuple[int, ...], int] = {}
        self._name_index: dict[str, int] = {}

    def of(self, row: Any) -> int:
        key = (int(row["call"]), int(row["group"]), int(row["site"]), int(row["peer"]))
        known = self._index.get(key)
        if known is None:
            known = self._index[key] = len(self.shown)
            evidence = self._picture.evidence
            call = evidence.call(row)
            peer = f" with rank {key[3]}" if row["flags"] & Flag.P2P else ""
            self.shown.append(
                {
                    "op": clean(call.operation, 60),
                    "text": clean(f"{call}{peer}", 200),
                    "group": clean(evidence.groups[key[1]].name, 80),
                    "site": clean(short_site(evidence.site(row)), 120),
                }
            )
        return known

    def name(self, text: str) -> int:
        shown = clean(text, 60)
        if shown not in self._name_index:
            self._name_index[shown] = len(self.names)
            self.names.append(shown)
        return self._name_index[shown]


def _operations(rows: npt.NDArray[Any], begin: int, kinds: _Kinds) -> list[int]:
    flat: list[int] = []
    for row in rows:
        start = (int(row["created_ns"]) - begin) // 1000
        ended = int(row["ended_ns"])
        length = max(0, (ended - int(row["created_ns"])) // 1000) if ended else -1
        if not ended and row["state"] == State.COMPLETED:
            length = 0  # torch with Gloo: completed at an unknown time
        if start + max(length, 0) < 0:
            continue
        number = int(row["sequence"] if row["sequence"] >= 0 else row["p2p_sequence"])
        flat += [start, length, kinds.of(row), number, int(row["state"])]
    return flat


def _spans(
    picture: Picture, facts: RankEvidence, begin: int, share: int, kinds: _Kinds
) -> list[int]:
    flat: list[int] = []
    texts = picture.evidence.tables.texts
    for row in facts.spans[-share:] if share else facts.spans[:0]:
        start = (int(row["started_ns"]) - begin) // 1000
        length = (int(row["ended_ns"]) - int(row["started_ns"])) // 1000
        if start + length >= 0:
            flat += [start, max(0, length), kinds.name(texts[int(row["name"])])]
    for span in facts.open_spans:
        flat += [(span.started_ns - begin) // 1000, -1, kinds.name(span.name)]
    return flat


def _begin(kept: list[npt.NDArray[Any]]) -> int:
    """Return the start of the timeline.

    This is the median start time of the first operation shown for each rank.
    """
    firsts = [int(rows["created_ns"][0]) for rows in kept if len(rows)]
    return int(np.median(firsts)) if firsts else 0


def _end(ranks: list[RankEvidence], kept: list[npt.NDArray[Any]], begin: int) -> int:
    """Return the time at which the ranks were last observed.

    If the records do not contain this time, return a time after the end of the last operation.
    """
    seen = max((facts.seen_ns for facts in ranks), default=0)
    last = max((_last(rows) for rows in kept), default=begin)
    return max(seen, last) if seen else last + (last - begin) // 2


def _last(rows: npt.NDArray[Any]) -> int:
    return int(max(rows["created_ns"].max(), rows["ended_ns"].max())) if len(rows) else 0


def _stall(picture: Picture, begin: int) -> int:
    """Return the start of the earliest stuck wait in microseconds since `begin`, or -1 if none."""
    since = [wait.since_ns for wait in picture.graph.waits]
    return max(0, (min(since) - begin) // 1000) if since else -1
