"""Determine whether the members of a group continued after an error that ended the group.

A rank has continued only if it completed collectives in at least two later steps. Barriers do not
count, because clean-up code might call them. If a program does not mark steps, a rank has continued
if it calls collectives at the same lines as before the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.matching.lanes import ROOTED
from echelon.analysis.evidence.model import Evidence
from echelon.recorder.format.schema import State

_MIN_STEPS = 2  # in which each member must have completed collectives
_MIN_CALLS = 2  # at call sites from before the error, if no steps are marked
_MIN_REPEATED = 4  # calls at sites with several calls, if there was no call before the error
_RECENT_SITES = 4
_RECENT_ROWS = 512
_BARRIERS = frozenset({"barrier", "monitored_barrier"})
_SEQUENCE_BITS = 40
Rows = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The collectives that the members of a group completed after an error.

    Attributes:
        failed: for each rank on which the error occurred, the index of its first failed row.
        over: the index of the group that the error ended, or -1 if none. Later calls in this group
            are ignored.
    """

    evidence: Evidence
    members: tuple[int, ...]
    failed: Mapping[int, int]
    over: int
    _kinds: dict[frozenset[str], npt.NDArray[np.bool_]] = field(default_factory=dict)

    def num_steps(self) -> int | None:
        """For each member, count the steps in which it completed a collective after the error.

        Returns:
            The smallest count; None if a member completed too few steps to show that it continued;
            0 if all members continued but the steps are unknown.
        """
        counts = [self._num_steps(rank) for rank in self.members]
        known = [count for count in counts if count is not None]
        return min(known, default=None) if len(known) == len(counts) else None

    def has_begun(self) -> bool:
        """Return whether every member completed at least one collective after the error."""
        return all(len(self._later(rank)) > 0 for rank in self.members)

    def _num_steps(self, rank: int) -> int | None:
        later = self._later(rank)
        steps = set(later["step"].tolist()) - self._steps_of_error - {-1}
        if len(steps) >= _MIN_STEPS:
            return len(steps)
        if not len(later) or bool((later["step"] >= 0).any()):
            return None
        return 0 if self._loops(rank, _places(later)) else None

    def _later(self, rank: int) -> Rows:
        """Return the collectives that a member completed after the error, oldest first."""
        if rank in self.failed:
            return self._since_error[rank]
        facts = self.evidence.ranks.get(rank)
        if facts is not None and len(facts.rows):
            rows = facts.rows[self._counts(facts.rows)]
            return np.asarray(rows[np.isin(_keys(rows), self._common)])
        # Others' records prove in which collectives a rank without rows took part.
        witness = max(self._since_error.values(), key=lambda rows: len(self._with(rows, rank)))
        return self._with(witness, rank)

    def _with(self, rows: Rows, rank: int) -> Rows:
        groups = [n for n, group in enumerate(self.evidence.groups) if rank in group.ranks]
        joint = np.isin(rows["group"], groups) & ~self._are_in(ROOTED)[rows["call"]]
        return np.asarray(rows[joint])

    @cached_property
    def _since_error(self) -> Mapping[int, Rows]:
        """The collectives completed after the error, for each rank on which the error occurred."""
        found = {}
        for rank, index in self.failed.items():
            rows = self.evidence.ranks[rank].rows[index + 1 :]
            found[rank] = rows[self._counts(rows) & (rows["group"] != self.over)]
        return found

    @cached_property
    def _common(self) -> npt.NDArray[np.int64]:
        """The keys of all collectives in `_since_error`, used to find them in other ranks' rows."""
        return np.unique(np.concatenate([_keys(rows) for rows in self._since_error.values()]))

    def _counts(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that show that the program continued: [num_rows]."""
        done = (rows["state"] == State.COMPLETED) & (rows["sequence"] >= 0)
        return np.asarray(done & ~self._are_in(_BARRIERS)[rows["call"]], np.bool_)

    def _are_in(self, operations: frozenset[str]) -> npt.NDArray[np.bool_]:
        """Return a mask of the calls that perform one of the given operations: [num_calls]."""
        if operations not in self._kinds:
            calls = self.evidence.tables.calls
            self._kinds[operations] = np.array([c.operation in operations for c in calls], bool)
        return self._kinds[operations]

    @cached_property
    def _steps_of_error(self) -> set[int]:
        return {int(self.evidence.ranks[r].rows[i]["step"]) for r, i in self.failed.items()}

    def _loops(self, rank: int, later: npt.NDArray[np.int64]) -> bool:
        """Return whether a rank's call sites show that it continued its training loop."""
        recent = self._recent(rank)
        if recent:
            return int(np.isin(later, recent).sum()) >= _MIN_CALLS
        _, counts = np.unique(later, return_counts=True)
        return int(counts[counts > 1].sum()) >= _MIN_REPEATED

    def _recent(self, rank: int) -> list[int]:
        """Return the last few call sites of a rank before the error.

        If the error did not occur on this rank, return the call sites of a rank on which it did.
        """
        known = rank if rank in self.failed else next(iter(self.failed))
        rows = self.evidence.ranks[known].rows[: self.failed[known]][-_RECENT_ROWS:]
        places = _places(rows[self._counts(rows)])
        return list(dict.fromkeys(reversed(places.tolist())))[:_RECENT_SITES]


def _keys(rows: Rows) -> npt.NDArray[np.int64]:
    """Return, for each row, a number that identifies its collective: [num_rows]."""
    groups = rows["group"].astype(np.int64) << _SEQUENCE_BITS
    return np.asarray(groups | rows["sequence"], np.int64)


def _places(rows: Rows) -> npt.NDArray[np.int64]:
    """Return a number that identifies each row's call site: [num_rows].

    If the site is unknown, the number identifies the row's call instead.
    """
    calls = -1 - rows["call"].astype(np.int64)
    return np.asarray(np.where(rows["site"] > 0, rows["site"], calls), np.int64)
