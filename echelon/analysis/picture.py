"""What the rules look at: the evidence with the common questions about it answered once.

A `Picture` is made once per analysis. It holds facts (who is inside what, who ended how, who waits
for whom), never conclusions: those are the rules'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from echelon.analysis.evidence import Evidence, RankEvidence
from echelon.analysis.lanes import Lanes, all_lanes
from echelon.analysis.links import BrokenLink, broken_links
from echelon.analysis.waits import Wait, WaitGraph, wait_graph
from echelon.recorder.schema import State

STUCK_AFTER_S = 5.0  # without an incident to say so, a wait this long is one
_CONCLUSIVE = frozenset({"stall", "failure"})


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The evidence, its lanes, and its wait-for graph."""

    evidence: Evidence
    lanes: Sequence[Lanes]
    all_waits: WaitGraph

    @cached_property
    def graph(self) -> WaitGraph:
        """The waits that count: those of a snapshot made because of trouble, and long ones."""
        return WaitGraph(tuple(wait for wait in self.all_waits.waits if self.is_stuck(wait)))

    def is_stuck(self, wait: Wait) -> bool:
        """Tell a wait that counts from an operation in flight."""
        if self.evidence.foreign or self.evidence.incident.kind in _CONCLUSIVE:
            return True
        return self.waited_s(wait) >= STUCK_AFTER_S

    def waited_s(self, wait: Wait) -> float:
        """Return how long a wait had lasted when its ranks were last seen; 0 if not known."""
        seen = [self.evidence.ranks[r].seen_ns for r in wait.waiting if r in self.evidence.ranks]
        return max(0, max(seen, default=0) - wait.since_ns) / 1e9

    @cached_property
    def disturbed(self) -> frozenset[int]:
        """Ranks that wait inside an operation, gave up in one, or did not end well."""
        inside = {rank for wait in self.graph.waits for rank in wait.waiting}
        failed = {r for r, facts in self.evidence.ranks.items() if failed_last(facts) is not None}
        ended = {r for r, facts in self.evidence.ranks.items() if facts.host.exit_code}
        return frozenset(inside | failed | ended)

    @cached_property
    def broken_links(self) -> tuple[BrokenLink, ...]:
        """Connections between ranks that carry nothing although something waits."""
        return broken_links(self.evidence.ranks)

    def links_within(self, ranks: Iterable[int]) -> tuple[BrokenLink, ...]:
        """Return the broken connections whose ends are both among `ranks`."""
        within = set(ranks)
        return tuple(
            one for one in self.broken_links if one.sender in within and one.receiver in within
        )

    def is_cut_off(self, wait: Wait) -> bool:
        """Tell whether packets vanish between ranks of a wait, or those that completed it."""
        return any(one.is_dead for one in self.links_within((*wait.waiting, *wait.completed)))

    @property
    def in_trouble(self) -> bool:
        """Whether anything at all is amiss, beyond rows that look odd."""
        return bool(self.disturbed) or self.evidence.incident.kind in _CONCLUSIVE

    def fallout(self, culprits: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that suffer from `culprits`."""
        culprits = set(culprits)
        reached = set(self.graph.fallout(culprits)) | self.disturbed
        return tuple(sorted(reached - culprits))

    def wait_for(self, ranks: Iterable[int]) -> Wait | None:
        """Return the earliest wait for one of `ranks`."""
        return next(iter(self.graph.waits_for(ranks)), None)


def take_picture(evidence: Evidence) -> Picture:
    """Match the records and build the wait-for graph."""
    lanes = all_lanes(evidence)
    return Picture(evidence=evidence, lanes=lanes, all_waits=wait_graph(evidence, lanes))


def failed_last(facts: RankEvidence) -> Any | None:
    """Return a rank's last row if that operation failed, else None."""
    if not len(facts.rows):
        return None
    last = facts.rows[-1]
    return last if last["state"] == State.FAILED else None


def last_row(facts: RankEvidence) -> Any | None:
    """Return the row a rank began last, None if it recorded none."""
    return facts.rows[-1] if len(facts.rows) else None


def is_inside(facts: RankEvidence) -> bool:
    """Tell whether any operation of a rank is still pending."""
    states = facts.rows["state"]
    return bool(np.isin(states, (State.CREATED, State.STARTED)).any())
