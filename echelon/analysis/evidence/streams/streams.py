"""Derive each rank's progress, and the waits between ranks, from torch's records.

The head of a rank's queue is its first pending operation across all groups. Only the operation at
the head is actually waiting. It waits for the members that have not entered it or have queued it
behind another operation. An operation that is enqueued but not listed as pending has completed.

torch's dumps are taken at different moments. If one rank has completed an operation that another
rank has not yet entered, the job was making progress while the dumps were taken. In this case,
pending operations do not prove a stall.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.recorder.format.schema import Flag, State

SENDS = frozenset({"send", "isend"})
# In these, a member may be finished before the others have arrived.
ROOTED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter"})
_MESSAGE = -1  # in place of a sequence number
Place = tuple[int, int]  # a collective: group, sequence
Way = tuple[int, int, int]  # a direction of a pair: group, sender, receiver


@dataclass(frozen=True, slots=True)
class Head:
    """A rank's first pending operation: a collective, or messages that were launched together."""

    rank: int
    group: int
    sequence: int  # _MESSAGE for messages
    rows: tuple[int, ...]
    state: int

    @property
    def is_message(self) -> bool:
        """True if the pending operation consists of messages that were launched together."""
        return self.sequence == _MESSAGE


@dataclass(frozen=True, slots=True)
class Message:
    """One rank's side of a message, which is pending on this rank or on the other one.

    `place` is the message's index among this rank's pending messages with the same sender and
    receiver.
    """

    rank: int
    row: int
    way: Way
    place: int
    is_send: bool
    is_done: bool = False  # as the other side of a pending one: this side has completed

    @property
    def peer(self) -> int:
        """The receiver of a send, or the sender of a receive."""
        return self.way[2] if self.is_send else self.way[1]


class Streams:
    """The streams of all ranks in one set of torch's dumps."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._rooted = np.array(
            [call.operation in ROOTED for call in evidence.tables.calls] + [False], bool
        )
        self._sends = np.array(
            [call.operation in SENDS for call in evidence.tables.calls] + [False], bool
        )
        self._whole: dict[tuple[int, int], bool] = {}
        self._origins: dict[tuple[int, int, int], tuple[int, int] | None] = {}
        self._done: dict[int, Mapping[Place, int]] = {}
        self._lines: dict[tuple[int, Way, bool], list[int]] = {}

    @cached_property
    def pending(self) -> Mapping[int, Mapping[int, frozenset[int]]]:
        """The sequence numbers of pending collectives, keyed by rank and then by group."""
        return {rank: _pending_collectives(facts) for rank, facts in self.evidence.ranks.items()}

    @cached_property
    def heads(self) -> Mapping[int, Head]:
        """The `Head` of each rank that has pending operations, keyed by rank."""
        found: dict[int, Head] = {}
        for rank, facts in self.evidence.ranks.items():
            head = _head(facts)
            if head is not None:
                found[rank] = head
        return found

    @cached_property
    def messages(self) -> Mapping[tuple[Way, bool], Sequence[Message]]:
        """The pending sends and receives, keyed by ((group, sender, receiver), is_send).

        Under each key, the messages are in the order of their rows in the rank's record.
        """
        found: dict[tuple[Way, bool], list[Message]] = {}
        for rank, facts in self.evidence.ranks.items():
            for index in _pending_messages(facts):
                row = facts.rows[index]
                peer, is_send = int(row["peer"]), bool(self._sends[int(row["call"])])
                if peer < 0:
                    continue
                way = (int(row["group"]), *((rank, peer) if is_send else (peer, rank)))
                line = found.setdefault((way, is_send), [])
                line.append(Message(rank, index, way, len(line), is_send))
        return found

    @cached_property
    def _by_row(self) -> Mapping[tuple[int, int], Message]:
        return {(one.rank, one.row): one for line in self.messages.values() for one in line}

    def are_sends(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether it records a send: [num_rows]."""
        found: npt.NDArray[np.bool_] = self._sends[rows["call"]]
        return found

    def message(self, rank: int, row: int) -> Message | None:
        """Return the pending message that a row records, or None."""
        return self._by_row.get((rank, row))

    def counterpart(self, message: Message) -> Message | None:
        """Return the counterpart of a pending message, or None if the peer has not posted it.

        The n-th send in a direction matches the n-th receive. If the oldest messages are missing,
        messages are counted from a collective that both ranks completed.
        """
        way, peer = message.way, message.peer
        if peer not in self.evidence.ranks:
            return None
        origin = self._origin(message.rank, peer, way[0])
        if origin is not None:
            own = [r for r in self._line(message.rank, way, message.is_send) if r >= origin[0]]
            theirs = [r for r in self._line(peer, way, not message.is_send) if r >= origin[1]]
            number = own.index(message.row)
            if number >= len(theirs):
                return None
            row = theirs[number]
            through = Message(peer, row, way, -1, not message.is_send, is_done=True)
            return self._by_row.get((peer, row), through)
        line = self.messages.get((way, not message.is_send), ())
        return line[message.place] if message.place < len(line) else None

    def _origin(self, rank: int, peer: int, group: int) -> tuple[int, int] | None:
        """Return the two ranks' rows from which to count messages; None if unknown."""
        key = (rank, peer, group)
        if key not in self._origins:
            if self.is_whole(rank, group) and self.is_whole(peer, group):
                self._origins[key] = (0, 0)
            else:
                self._origins[key] = self._meeting(rank, peer)
        return self._origins[key]

    def _meeting(self, rank: int, peer: int) -> tuple[int, int] | None:
        """Return both ranks' rows for the oldest collective that both completed, or None."""
        one, other = self._completed(rank), self._completed(peer)
        common = [place for place in one if place in other]
        return (one[common[0]], other[common[0]]) if common else None

    def _completed(self, rank: int) -> Mapping[Place, int]:
        known = self._done.get(rank)
        if known is None:
            rows = self.evidence.ranks[rank].rows
            done = np.flatnonzero((rows["sequence"] >= 0) & (rows["state"] == State.COMPLETED))
            places = zip(rows["group"][done].tolist(), rows["sequence"][done].tolist(), strict=True)
            known = self._done[rank] = dict(zip(places, done.tolist(), strict=True))
        return known

    def is_whole(self, rank: int, group: int) -> bool:
        """Return whether a rank's record of its messages in a group is complete."""
        known = self._whole.get((rank, group))
        if known is None:
            rows = self.evidence.ranks[rank].rows
            mine = rows[((rows["flags"] & Flag.P2P) > 0) & (rows["group"] == group)]
            numbers = np.unique(mine["p2p_sequence"])
            known = not len(numbers) or (
                int(numbers[0]) <= 1 and len(numbers) == int(numbers[-1] - numbers[0]) + 1
            )
            self._whole[rank, group] = known
        return known

    def _line(self, rank: int, way: Way, is_send: bool) -> list[int]:
        """Return the rows of a rank's sends to, or receives from, one peer, oldest first."""
        known = self._lines.get((rank, way, is_send))
        if known is None:
            rows = self.evidence.ranks[rank].rows
            peer = way[2] if is_send else way[1]
            mine = ((rows["flags"] & Flag.P2P) > 0) & (rows["group"] == way[0])
            mine &= (rows["peer"] == peer) & (self._sends[rows["call"]] == is_send)
            known = self._lines[rank, way, is_send] = np.flatnonzero(mine).tolist()
        return known

    def entered(self, rank: int, group: int) -> int:
        """Return the number of the last collective that a rank entered in a group; 0 if none."""
        facts = self.evidence.ranks.get(rank)
        return 0 if facts is None else self._entered[rank].get(group, 0)

    @cached_property
    def _entered(self) -> Mapping[int, Mapping[int, int]]:
        return {
            rank: {**_last_listed(facts), **facts.entered}
            for rank, facts in self.evidence.ranks.items()
        }

    def has_completed(self, rank: int, place: Place) -> bool:
        """Return whether a rank has completed a collective."""
        group, sequence = place
        facts = self.evidence.ranks.get(rank)
        if facts is None or self.entered(rank, group) < sequence or self._is_lost(facts, place):
            return False
        return sequence not in self.pending[rank].get(group, frozenset())

    @staticmethod
    def _is_lost(facts: RankEvidence, place: Place) -> bool:
        """Return whether the row of an incomplete collective might have been overwritten."""
        group, sequence = place
        if facts.completed.get(group, sequence) >= sequence:
            return False
        listed = facts.rows[facts.rows["sequence"] >= 0]
        is_whole = bool((listed["state"] == State.COMPLETED).any())
        own = listed["sequence"][listed["group"] == group]
        return is_whole and bool(len(own)) and int(own.min()) > sequence

    def is_at(self, rank: int, place: Place) -> bool:
        """Return whether a collective is at the head of a rank's queue."""
        head = self.heads.get(rank)
        return head is not None and (head.group, head.sequence) == place

    def is_rooted(self, head: Head) -> bool:
        """Return whether `head`'s operation can complete on a member before all members call it."""
        row = self.evidence.ranks[head.rank].rows[head.rows[0]]
        return bool(self._rooted[int(row["call"])])

    @cached_property
    def has_starts(self) -> bool:
        """True if the dumps record when kernels started."""
        return any(
            bool((facts.rows["started_ns"] > 0).any()) for facts in self.evidence.ranks.values()
        )

    @cached_property
    def is_moving(self) -> bool:
        """True if the dumps prove that the job made progress while torch was writing them."""
        return any(self._moves(number) for number in range(len(self.evidence.groups)))

    def _moves(self, group: int) -> bool:
        # A rank without a counter there may have one that could not be joined to the group.
        there = [
            rank
            for rank in self.evidence.groups[group].ranks
            if group in self._entered.get(rank, {})
        ]
        if len(there) < 2:
            return False
        slowest = min(self.entered(rank, group) for rank in there)
        return any(self._is_past(rank, group, slowest) for rank in there)

    def _is_past(self, rank: int, group: int, sequence: int) -> bool:
        """Return whether a rank has completed a non-rooted collective numbered above `sequence`."""
        entered = self.entered(rank, group)
        if entered <= sequence:
            return False
        first = min(self.pending[rank].get(group, frozenset()), default=entered + 1)
        rows = self.evidence.ranks[rank].rows
        done = self.evidence.ranks[rank].completed.get(group)
        if done is not None and bool((rows["ended_ns"] > 0).any()):
            # A ring that has wrapped may have lost pending ones. Dumps of active entries list no
            # completed ones, and their counter lags behind.
            listed = rows[(rows["group"] == group) & (rows["state"] == State.COMPLETED)]["sequence"]
            first = min(first, max(done, int(listed.max(initial=0))) + 1)
        if first - 1 <= sequence:
            return False
        mine = rows[(rows["group"] == group) & (rows["sequence"] > sequence)]
        early = {int(n) for n in mine["sequence"][self._rooted[mine["call"]]]}
        return any(number not in early for number in range(sequence + 1, first))


def _is_pending(rows: Any) -> Any:
    return (rows["state"] == State.CREATED) | (rows["state"] == State.STARTED)


def _pending_collectives(facts: RankEvidence) -> dict[int, frozenset[int]]:
    rows = facts.rows[_is_pending(facts.rows) & (facts.rows["sequence"] >= 0)]
    found: dict[int, set[int]] = {}
    for group, sequence in zip(rows["group"].tolist(), rows["sequence"].tolist(), strict=True):
        found.setdefault(group, set()).add(sequence)
    return {group: frozenset(numbers) for group, numbers in found.items()}


def _pending_messages(facts: RankEvidence) -> Iterator[int]:
    is_message = (facts.rows["flags"] & Flag.P2P) > 0
    yield from np.flatnonzero(is_message & _is_pending(facts.rows)).tolist()


def _last_listed(facts: RankEvidence) -> dict[int, int]:
    rows = facts.rows[facts.rows["sequence"] >= 0]
    return {
        int(group): int(rows["sequence"][rows["group"] == group].max())
        for group in np.unique(rows["group"])
    }


def _head(facts: RankEvidence) -> Head | None:
    rows = facts.rows
    pending = np.flatnonzero(_is_pending(rows))
    if not len(pending):
        return None
    first = int(pending[0])
    row = rows[first]
    group, state = int(row["group"]), int(row["state"])
    if not row["flags"] & Flag.P2P:
        return Head(facts.rank, group, int(row["sequence"]), (first,), state)
    launch = pending[
        (rows["group"][pending] == group)
        & (rows["p2p_sequence"][pending] == row["p2p_sequence"])
        & ((rows["flags"][pending] & Flag.P2P) > 0)
    ]
    return Head(facts.rank, group, _MESSAGE, tuple(launch.tolist()), state)
