"""Prepare the input for the rules: the evidence, and facts derived from the evidence.

A `Picture` is created once per analysis. It contains facts, such as which rank is inside which
operation, but no conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from echelon.analysis.evidence.errors.survived import Survived, without_survived
from echelon.analysis.evidence.links import BrokenLink, broken_links
from echelon.analysis.evidence.matching.exchange import Exchanges
from echelon.analysis.evidence.matching.lanes import Lanes, all_lanes
from echelon.analysis.evidence.matching.waits import Wait, WaitGraph, wait_graph
from echelon.analysis.evidence.model import Evidence, RankEvidence
from echelon.analysis.evidence.stacks.frames import main_thread
from echelon.analysis.evidence.streams.streams import Streams
from echelon.analysis.evidence.streams.waits import stream_graph
from echelon.recorder.format.schema import State

_Found = TypeVar("_Found")
STUCK_AFTER_S = 5.0  # without an incident, a wait this long counts as one
_YOUNG_SHARE = 0.2  # share of the oldest wait's age: a younger operation is in flight
_CONCLUSIVE = frozenset({"stall", "failure"})


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The evidence, with its lanes and its wait-for graph."""

    evidence: Evidence
    lanes: Sequence[Lanes]
    all_waits: WaitGraph
    streams: Streams | None = None  # of torch's dumps
    own_exchanges: Exchanges | None = None  # of echelon's records: torch's have streams
    survived: tuple[Survived, ...] = ()  # the mismatches whose calls the evidence leaves out
    recorded: Evidence | None = None  # the evidence with these calls; None if there are none
    _memory: dict[str, Any] = field(default_factory=dict)

    def remembered(self, key: str, find: Callable[[Picture], _Found]) -> _Found:
        """Return `find(self)`, computed once and then cached under `key`."""
        if key not in self._memory:
            self._memory[key] = find(self)
        found: _Found = self._memory[key]
        return found

    @property
    def whole(self) -> Evidence:
        """All of the evidence, including calls that failed with errors that the job survived."""
        return self.recorded or self.evidence

    @cached_property
    def lanes_in_use(self) -> Sequence[Lanes]:
        """The lanes of all groups, except groups ended by an error that the job survived."""
        over = {one.group for one in self.survived if one.is_group_over}
        return [lanes for lanes in self.lanes if lanes.group not in over]

    @cached_property
    def exchanges(self) -> Exchanges:
        """The sends and receives, matched by the message numbers in echelon's own records."""
        return self.own_exchanges or Exchanges(self.evidence)

    @cached_property
    def graph(self) -> WaitGraph:
        """The wait-for graph of all stuck waits and of the waits on which they depend."""
        waits = [wait for wait in self.all_waits.waits if not self.is_over(wait)]
        old = [wait for wait in waits if self.is_stuck(wait)]
        return WaitGraph(tuple(self._with_reached(old, waits)))

    def is_stuck(self, wait: Wait) -> bool:
        """Return whether a wait counts as stuck; a recent operation is merely in flight."""
        if self.evidence.foreign or self.evidence.incident.kind == "failure":
            return True
        return not self.is_in_flight(wait.age_s)

    def is_in_flight(self, age_s: float) -> bool:
        """Return whether an operation of this age counts as in flight rather than stuck."""
        if self.evidence.incident.kind == "stall":
            return age_s < _YOUNG_SHARE * self._oldest_s
        return age_s < STUCK_AFTER_S

    def is_over(self, wait: Wait) -> bool:
        """Return whether all waiting ranks made progress between the two snapshots."""
        return bool(wait.waiting) and self._moved.issuperset(wait.waiting)

    @cached_property
    def _moved(self) -> frozenset[int]:
        return frozenset(rank for rank, facts in self.evidence.ranks.items() if has_moved(facts))

    @cached_property
    def _oldest_s(self) -> float:
        return max((wait.age_s for wait in self.all_waits.waits), default=0.0)

    @staticmethod
    def _with_reached(old: list[Wait], waits: list[Wait]) -> list[Wait]:
        """Return `old` and all newer waits on which these depend, directly or indirectly."""
        kept = {id(wait) for wait in old}
        by_rank: dict[int, list[Wait]] = {}
        for wait in waits:
            for rank in wait.waiting if id(wait) not in kept else ():
                by_rank.setdefault(rank, []).append(wait)
        open_ = [rank for wait in old for rank in wait.absent]
        while open_:
            for wait in by_rank.pop(open_.pop(), ()):
                if id(wait) not in kept:
                    kept.add(id(wait))
                    open_ += wait.absent
        return [wait for wait in waits if id(wait) in kept]

    def waited_s(self, wait: Wait) -> float:
        """Return the age of a wait in seconds, or 0 if unknown."""
        return wait.age_s

    @cached_property
    def heads(self) -> dict[int, tuple[int, int]]:
        """Each rank's first pending operation, which blocks its stream, as (group, sequence)."""
        found: dict[int, tuple[int, int]] = {}
        for rank, facts in self.evidence.ranks.items():
            pending = np.flatnonzero(np.isin(facts.rows["state"], (State.CREATED, State.STARTED)))
            if len(pending):
                row = facts.rows[int(pending[0])]
                found[rank] = int(row["group"]), int(row["sequence"])
        return found

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """The ranks that failed, timed out, or are waiting in an operation."""
        inside = {rank for wait in self.graph.waits for rank in wait.waiting}
        failed = {r for r, facts in self.evidence.ranks.items() if failed_last(facts) is not None}
        ended = {r for r, facts in self.evidence.ranks.items() if facts.host.exit_code}
        return frozenset(inside | failed | ended)

    @cached_property
    def unseen(self) -> frozenset[int]:
        """The ranks whose records contain neither operations nor a stack."""
        ranks = self.evidence.ranks
        recorded = {rank for rank, facts in ranks.items() if facts.has_ring and len(facts.rows)}
        silent = {
            rank
            for rank, facts in ranks.items()
            if recorded and not facts.has_ring and not len(facts.rows) and facts.host.alive
            and not facts.host.stacks
        }  # fmt: skip
        return frozenset(set(self.evidence.missing) | silent)

    @cached_property
    def broken_links(self) -> tuple[BrokenLink, ...]:
        """The rank-to-rank connections on which data is waiting but not moving."""
        return broken_links(self.evidence.ranks)

    def links_within(self, ranks: Iterable[int]) -> tuple[BrokenLink, ...]:
        """Return the broken links with both ends among `ranks`."""
        within = set(ranks)
        return tuple(
            one for one in self.broken_links if one.sender in within and one.receiver in within
        )

    def is_cut_off(self, wait: Wait) -> bool:
        """Return whether packets are being lost between the participants in an operation."""
        return any(one.is_dead for one in self.links_within((*wait.waiting, *wait.completed)))

    @property
    def in_trouble(self) -> bool:
        """True if `disturbed` is not empty, or if a stall or a failure triggered the snapshot."""
        return bool(self.disturbed) or self.evidence.incident.kind in _CONCLUSIVE

    def fallout(self, culprits: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks other than `culprits` that are disturbed or wait for `culprits`."""
        culprits = set(culprits)
        reached = set(self.graph.fallout(culprits)) | self.disturbed
        return tuple(sorted(reached - culprits))

    def dragged_along(self, gone: set[int]) -> set[int]:
        """Return the dead ranks and all ranks affected by their death.

        A rank is affected if it is inside the same operation as a dead rank, or if it waits for a
        dead or affected rank.
        """
        reached: set[int] = set(gone)
        for wait in self.graph.waits:
            if not gone.isdisjoint(wait.waiting):
                reached.update(wait.waiting)
        return reached | set(self.graph.fallout(reached))

    def wait_for(self, ranks: Iterable[int]) -> Wait | None:
        """Return the earliest wait for any of `ranks`, or None if no rank waits for them.

        A wait in which no other rank is absent is preferred.
        """
        return next(iter(self.graph.waits_for(ranks)), None)


def take_picture(recorded: Evidence) -> Picture:
    """Match the records and build the wait-for graph, ignoring errors that the job survived."""
    evidence, survived = without_survived(recorded)
    lanes = all_lanes(evidence)
    if evidence.foreign == "torch":
        streams = Streams(evidence)
        waits = stream_graph(streams)
        return Picture(evidence=evidence, lanes=lanes, all_waits=waits, streams=streams)
    exchanges = Exchanges(evidence)
    return Picture(
        evidence=evidence,
        lanes=lanes,
        all_waits=wait_graph(evidence, lanes, exchanges),
        own_exchanges=exchanges,
        survived=survived,
        recorded=recorded if survived else None,
    )


def failed_last(facts: RankEvidence) -> Any | None:
    """Return a rank's last row if it records a failed operation, otherwise None."""
    if not len(facts.rows):
        return None
    last = facts.rows[-1]
    return last if last["state"] == State.FAILED else None


def last_row(facts: RankEvidence) -> Any | None:
    """Return the row of a rank's most recent operation, or None if the rank has no rows."""
    return facts.rows[-1] if len(facts.rows) else None


def has_moved(facts: RankEvidence) -> bool:
    """Return whether a rank made progress between the two snapshots.

    If stacks were captured, the main thread's stack must also have changed.
    """
    host = facts.host
    if host.later_gap_s <= 0 or host.later_recorded <= 0:
        return False
    first, later = main_thread(host.stacks), main_thread(host.later_stacks)
    return first is None or later is None or first.frames != later.frames


def is_inside(facts: RankEvidence) -> bool:
    """Return whether any operation of a rank is pending."""
    states = facts.rows["state"]
    return bool(np.isin(states, (State.CREATED, State.STARTED)).any())
