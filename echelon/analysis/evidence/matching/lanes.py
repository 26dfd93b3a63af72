"""Arrange each group's collectives in a matrix of members (rows) by sequence numbers (columns).

Cells in the same column belong to the same collective. All later steps of the analysis, such as the
vote and the wait-for graph, use these matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.model import Evidence
from echelon.recorder.format.schema import State

ABSENT = -1
# Operations that some members may finish before all have entered.
ROOTED = frozenset({"reduce", "gather", "broadcast", "scatter"})
_FEW = 32  # number of groups per rank above which sorting is cheaper
_REACH = 4  # how far from the middle rank the axis may reach, in lengths of the longest lane


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The collectives of one group.

    Attributes:
        members: the global ranks of the members with a record, in group order: [num_members].
        strangers: the global ranks of the members without a record, in ascending order.
        sequences: the sequence number of each column, in ascending order: [num_columns].
        rows: for each cell, the index of its row among the member's rows, or ABSENT: [num_members,
            num_columns].
    """

    group: int
    name: str
    evidence: Evidence
    members: npt.NDArray[np.int64]
    strangers: tuple[int, ...]
    sequences: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]

    def column(self, field: str, absent: int = ABSENT) -> npt.NDArray[Any]:
        """Return one field of each cell's row: [num_members, num_columns].

        Cells without a row have the value `absent`.
        """
        dtype = np.int64 if field.endswith("_ns") or field == "num_bytes" else np.int32
        out = np.full(self.rows.shape, absent, dtype)
        for index, rank in enumerate(self.members.tolist()):
            own = self.rows[index]
            here = own >= 0
            values = self.evidence.ranks[rank].rows[field]
            out[index, here] = values[own[here]]
        return out

    @cached_property
    def state(self) -> npt.NDArray[np.int32]:
        """The `State` of each cell's row, or ABSENT if it has none: [num_members, num_columns]."""
        return self.column("state")

    @cached_property
    def comparable(self) -> npt.NDArray[np.int32]:
        """The comparable call of each cell (see `Tables.comparable`): [num_members, num_columns].

        A cell for which the member recorded no call has the value ABSENT.
        """
        lookup = np.array([*self.evidence.tables.comparable, ABSENT], np.int32)
        votes: npt.NDArray[np.int32] = lookup[self.column("call")]
        return votes

    @cached_property
    def first(self) -> npt.NDArray[np.int64]:
        """The index of each member's first column, or num_columns if none: [num_members]."""
        present = self.rows >= 0
        none = self.rows.shape[1]
        return np.asarray(np.where(present.any(axis=1), present.argmax(axis=1), none), np.int64)

    @cached_property
    def last(self) -> npt.NDArray[np.int64]:
        """The index of each member's last column, or -1 if none: [num_members]."""
        present = self.rows[:, ::-1] >= 0
        place = self.rows.shape[1] - 1 - present.argmax(axis=1)
        return np.asarray(np.where(present.any(axis=1), place, -1), np.int64)

    @cached_property
    def pending(self) -> npt.NDArray[np.int64]:
        """The column of each member's first pending operation, or -1 if none: [num_members].

        A member's last operation counts as pending if it failed.
        """
        waiting = (self.state == State.CREATED) | (self.state == State.STARTED)
        has_last = np.flatnonzero(self.last >= 0)
        at_last = self.last[has_last]
        waiting[has_last, at_last] |= self.state[has_last, at_last] == State.FAILED
        return np.asarray(np.where(waiting.any(axis=1), waiting.argmax(axis=1), -1), np.int64)

    @cached_property
    def proven(self) -> npt.NDArray[np.bool_]:
        """True for each collective that all members must have entered: [num_columns].

        A completed call by any member proves this, unless the operation has a root rank.
        """
        calls = self.evidence.tables.calls
        is_rooted = np.array([call.operation in ROOTED for call in calls] + [False], bool)
        done = (self.state == State.COMPLETED) & ~is_rooted[self.column("call")]
        return np.asarray(done.any(axis=0), np.bool_)

    def row(self, member: int, column: int) -> Any | None:
        """Return a member's row in a column, or None if the cell is empty."""
        index = int(self.rows[member, column])
        if index < 0:
            return None
        return self.evidence.ranks[int(self.members[member])].rows[index]

    def ranks(self, members: npt.NDArray[Any] | Sequence[int]) -> tuple[int, ...]:
        """Return the global ranks of the given member indices, in ascending order."""
        return tuple(sorted(int(rank) for rank in self.members[np.asarray(members, np.int64)]))


def all_lanes(evidence: Evidence) -> list[Lanes]:
    """Return the lanes of every group that has at least one collective."""
    own: dict[int, dict[int, npt.NDArray[Any]]] = {}
    for rank, facts in evidence.ranks.items():
        collective = np.flatnonzero(facts.rows["sequence"] >= 0)
        groups = facts.rows["group"][collective]
        for group in _distinct(groups):
            own.setdefault(group, {})[rank] = collective[groups == group].astype(np.int32)
    return [_lanes(evidence, group, own[group]) for group in sorted(own)]


def _distinct(numbers: npt.NDArray[Any]) -> list[int]:
    """Return the distinct values of an array, not necessarily in ascending order."""
    found: list[int] = []
    while len(numbers) and len(found) < _FEW:
        found.append(int(numbers[0]))
        numbers = numbers[numbers != numbers[0]]
    return found + [int(number) for number in np.unique(numbers)]


def _lanes(evidence: Evidence, group: int, own: dict[int, npt.NDArray[Any]]) -> Lanes:
    recorded = evidence.groups[group].ranks
    known = [rank for rank in recorded if rank in evidence.ranks]
    members = known + sorted(set(own) - set(known))
    numbers = {rank: evidence.ranks[rank].rows["sequence"][index] for rank, index in own.items()}
    sequences = _axis(list(numbers.values()))
    rows = np.full((len(members), len(sequences)), ABSENT, np.int32)
    for position, rank in enumerate(members):
        if rank in own and len(sequences):
            columns = numbers[rank] - sequences[0]
            inside = (columns >= 0) & (columns < len(sequences))
            rows[position, columns[inside]] = own[rank][inside]
    return Lanes(
        group=group,
        name=evidence.groups[group].name,
        evidence=evidence,
        members=np.array(members, np.int64),
        strangers=tuple(sorted(set(recorded) - set(known))),
        sequences=sequences,
        rows=rows,
    )


def _axis(numbers: list[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Return the columns' sequence numbers as one contiguous range.

    Numbers that are far from all others, as in a damaged file, are left out.
    """
    longest = max(len(n) for n in numbers)
    middle = int(np.median([int(n.max()) for n in numbers]))
    reach = _REACH * longest + 1024
    low = max(min(int(n.min()) for n in numbers), middle - reach)
    high = min(max(int(n.max()) for n in numbers), middle + reach)
    return np.arange(low, high + 1, dtype=np.int64)
