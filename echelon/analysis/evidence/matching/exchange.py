"""Index the sends and receives in echelon's records by pair of ranks.

Both sides number their messages, so the n-th send of a pair matches the n-th receive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.recorder.format.schema import Flag, State

SENDS = frozenset({"send", "isend"})
RECEIVES = frozenset({"recv", "irecv"})
Side = tuple[int, int, int, bool]  # rank, group, peer, whether it sends


class Exchanges:
    """The sends and receives of all ranks, indexed by pair of ranks."""

    def __init__(self, evidence: Evidence) -> None:
        calls = evidence.tables.calls
        self._sends = np.array([call.operation in SENDS for call in calls] + [False], bool)
        self._receives = np.array([call.operation in RECEIVES for call in calls] + [False], bool)
        self._latest: dict[Side, int] = {}
        self._between: dict[tuple[int, int, bool], int] = {}
        self._senders: dict[int, list[int]] = {}
        self._done: set[tuple[int, int, int]] = set()
        self.pending: dict[int, list[Any]] = {}
        for facts in evidence.ranks.values():
            self._add(facts)

    def _add(self, facts: RankEvidence) -> None:
        places = np.flatnonzero((facts.rows["flags"] & Flag.P2P) > 0)
        if not len(places):
            return
        rows = facts.rows[places]
        is_send, is_receive = self._sends[rows["call"]], self._receives[rows["call"]]
        self._number(facts.rank, rows, is_send, is_receive)
        ended = rows[rows["ended_ns"] > 0]
        pairs = np.unique(_packed(ended["peer"], ended["call"])).tolist()
        self._done.update((facts.rank, *_unpacked(pair)) for pair in pairs)
        first = self._first_pending(facts, places, rows, is_send)
        if first:
            self.pending[facts.rank] = first

    def _number(self, rank: int, rows: Any, is_send: Any, is_receive: Any) -> None:
        for way, mine in ((True, is_send), (False, is_receive)):
            own = rows[mine]
            sides, inverse = np.unique(_packed(own["peer"], own["group"]), return_inverse=True)
            numbers = np.full(len(sides), -1, np.int64)
            np.maximum.at(numbers, inverse, own["p2p_sequence"])
            for side, number in zip(sides.tolist(), numbers.tolist(), strict=True):
                peer, group = _unpacked(side)
                self._latest[rank, group, peer, way] = number
                between = self._between.get((rank, peer, way))
                if way and between is None:
                    self._senders.setdefault(peer, []).append(rank)
                self._between[rank, peer, way] = max(number, -1 if between is None else between)

    @staticmethod
    def _first_pending(facts: RankEvidence, places: Any, rows: Any, is_send: Any) -> list[Any]:
        """Return the first pending row per (group, peer, direction).

        A failed operation in a rank's last row also counts as pending.
        """
        inside = (rows["state"] == State.CREATED) | (rows["state"] == State.STARTED)
        inside |= (rows["state"] == State.FAILED) & (places == len(facts.rows) - 1)
        first: dict[tuple[int, int, bool], Any] = {}
        for index in np.flatnonzero(inside).tolist():
            row = rows[index]
            first.setdefault((int(row["group"]), int(row["peer"]), bool(is_send[index])), row)
        return list(first.values())

    def is_send(self, row: Any) -> bool:
        """Return whether a row records a send."""
        return bool(self._sends[int(row["call"])])

    def is_answered(self, rank: int, row: Any) -> bool:
        """Return whether a row's peer is known to have posted the matching operation."""
        side = (int(row["peer"]), int(row["group"]), rank, not self.is_send(row))
        latest = self._latest.get(side)
        return latest is not None and latest >= int(row["p2p_sequence"])

    def has_done(self, rank: int, row: Any) -> bool:
        """Return whether a rank has ever completed the call in `row` with the same peer."""
        return (rank, int(row["peer"]), int(row["call"])) in self._done

    def unheard(self, rank: int) -> list[int]:
        """Return the ranks that have sent messages for which `rank` has not posted a receive."""
        return sorted(
            sender
            for sender in self._senders.get(rank, ())
            if sender != rank
            and self._between[sender, rank, True] > self._between.get((rank, sender, False), -1)
        )


def _packed(peers: Any, others: Any) -> Any:
    return (peers.astype(np.int64) + 1 << 32) | others.astype(np.int64)


def _unpacked(pair: int) -> tuple[int, int]:
    return (pair >> 32) - 1, pair & 0xFFFFFFFF
