"""Build the wait-for graph across groups and point-to-point operations.

A rank inside a collective waits for every member that has not entered it. A send or receive waits
for its counterpart. One `Wait` represents all ranks that wait in the same operation for the same
ranks. A sink is a rank that other ranks are waiting for but that is not waiting itself. The cause
of a hang is found at a sink. A cycle of waits means that ranks called operations in different
orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from echelon.analysis.evidence.matching.exchange import SENDS, Exchanges
from echelon.analysis.evidence.matching.lanes import ROOTED, Lanes
from echelon.analysis.evidence.model import Evidence
from echelon.recorder.format.schema import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The ranks inside one operation, and the ranks that they are waiting for.

    If all members are inside, `absent` is empty.
    """

    group: str
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    since_ns: int  # when the first of them arrived, on rank 0's clock
    age_s: float = 0.0  # for how long, when they were last seen; 0: not known
    completed: tuple[int, ...] = ()  # members that have already completed it
    created: tuple[int, ...] = ()  # those that wait and whose kernel has not started
    is_p2p: bool = False
    peer: int = -1  # the peer of a send or receive
    members: int = 0
    vague: bool = False  # the group's members were inferred
    has_mismatch: bool = False  # one of those that wait has raised a mismatch
    gave_up: bool = False  # an error is recorded: a timeout expired

    def __str__(self) -> str:
        """Name the operation, for example `all_reduce #1042` or `recv from rank 2`."""
        if self.is_p2p:
            return (
                f"{self.operation} {'to' if self.operation in SENDS else 'from'} rank {self.peer}"
            )
        return f"{self.operation} #{self.sequence}"

    @property
    def number(self) -> int | None:
        """The operation's sequence number, or None if unknown."""
        return self.sequence if self.sequence >= 0 else None


@dataclass(frozen=True)
class WaitGraph:
    """All waits in one snapshot."""

    waits: tuple[Wait, ...]

    @cached_property
    def blocked(self) -> frozenset[int]:
        """The ranks that are waiting for another rank."""
        return frozenset(rank for wait in self.waits if wait.absent for rank in wait.waiting)

    @cached_property
    def wanted(self) -> frozenset[int]:
        """The ranks that other ranks are waiting for."""
        return frozenset(self._by_absent)

    @cached_property
    def waiting(self) -> frozenset[int]:
        """The ranks that are inside an operation."""
        return frozenset(rank for wait in self.waits for rank in wait.waiting)

    @cached_property
    def _by_absent(self) -> dict[int, list[int]]:
        """The indices of the waits, keyed by absent rank."""
        found: dict[int, list[int]] = {}
        for number, wait in enumerate(self.waits):
            for rank in wait.absent:
                found.setdefault(rank, []).append(number)
        return found

    @property
    def sinks(self) -> tuple[int, ...]:
        """The ranks that others wait for but that do not wait themselves."""
        return tuple(sorted(self.wanted - self.blocked))

    def waits_for(self, ranks: Iterable[int]) -> tuple[Wait, ...]:
        """Return the waits in which any of `ranks` is absent.

        Waits in which no other rank is absent come first.
        """
        wanted = set(ranks)
        numbers = sorted({n for rank in wanted for n in self._by_absent.get(rank, ())})
        found = [self.waits[number] for number in numbers]
        alone = {id(wait): wanted.issuperset(wait.absent) for wait in found}
        return tuple(sorted(found, key=lambda wait: (not alone[id(wait)], wait.since_ns)))

    def is_joint(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Return whether a single operation is waiting for ranks in both sets."""
        first = {number for rank in some for number in self._by_absent.get(rank, ())}
        return any(number in first for rank in others for number in self._by_absent.get(rank, ()))

    def fallout(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks that are waiting for `ranks`, directly or through others."""
        culprits = frozenset(ranks)
        reached = set(culprits)
        open_ = list(culprits)
        seen: set[int] = set()
        while open_:
            for number in self._by_absent.get(open_.pop(), ()):
                if number not in seen:
                    seen.add(number)
                    new = [rank for rank in self.waits[number].waiting if rank not in reached]
                    reached.update(new)
                    open_ += new
        return tuple(sorted(reached - culprits))

    def cycle(self) -> tuple[int, ...]:
        """Return the ranks in a cycle of waits, or () if there is no cycle.

        If there are several cycles, the cycle with the earliest wait is returned.
        """
        successors: dict[Any, list[Any]] = {}
        for number, wait in enumerate(self.waits):
            if not wait.absent:
                continue
            node = ("wait", number)
            successors[node] = list(wait.absent)
            for rank in wait.waiting:
                successors.setdefault(rank, []).append(node)
        rings = [ring for ring in _components(successors) if len(ring) > 1]
        if not rings:
            return ()
        first = min(rings, key=self._began)
        return tuple(sorted(node for node in first if isinstance(node, int)))

    def _began(self, ring: Sequence[Any]) -> int:
        return min(self.waits[node[1]].since_ns for node in ring if isinstance(node, tuple))


def wait_graph(evidence: Evidence, lanes: Sequence[Lanes], exchanges: Exchanges) -> WaitGraph:
    """Build the wait-for graph for all pending operations."""
    waits = [wait for lane in lanes for wait in _collective_waits(evidence, lane)]
    return WaitGraph(tuple(waits + _p2p_waits(evidence, exchanges)))


def _collective_waits(evidence: Evidence, lane: Lanes) -> Iterable[Wait]:
    """Yield one wait per column in which at least one rank is waiting.

    A member waits only in its first pending column.
    """
    pending = lane.pending
    for column in sorted(set(pending[pending >= 0].tolist())):
        waiting = np.flatnonzero(pending == column)
        done = np.flatnonzero(lane.state[:, column] == State.COMPLETED)
        own = [(member, lane.row(member, column)) for member in waiting.tolist()]
        rows = [row for _, row in own if row is not None]
        operation = _most_common([evidence.call(row).operation for row in rows])
        is_rooted = operation in ROOTED
        created = np.flatnonzero((pending == column) & (lane.state[:, column] == State.CREATED))
        ages = [_age_s(evidence, int(lane.members[m]), row) for m, row in own if row is not None]
        absent: tuple[int, ...] = ()
        raised = any("MismatchError" in evidence.error(row) for row in rows)
        if not lane.proven[column] and not raised:  # a rank that raised a mismatch does not wait
            absent = (*lane.ranks(np.flatnonzero(lane.last < column)), *lane.strangers)
        yield Wait(
            group=lane.name,
            operation=operation,
            sequence=int(lane.sequences[column]),
            waiting=lane.ranks(waiting),
            absent=tuple(sorted(absent)),
            since_ns=min(int(row["created_ns"]) for row in rows),
            age_s=max(ages),
            completed=() if is_rooted else lane.ranks(done),
            created=lane.ranks(created),
            members=len(lane.members) + len(lane.strangers),
            vague=lane.group in evidence.vague_groups,
            has_mismatch=raised,
            gave_up=any(evidence.error(row) for row in rows),
        )


def _age_s(evidence: Evidence, rank: int, row: Any) -> float:
    """Return how old a rank's operation was, in seconds, when the rank was last observed."""
    return max(0, evidence.ranks[rank].seen_ns - int(row["created_ns"])) / 1e9


def _p2p_waits(evidence: Evidence, exchanges: Exchanges) -> list[Wait]:
    waits: list[Wait] = []
    for rank, rows in exchanges.pending.items():
        for row in rows:
            call, peer = evidence.call(row), int(row["peer"])
            if peer < 0 or peer == rank:
                continue
            waits.append(
                Wait(
                    group=evidence.groups[int(row["group"])].name,
                    operation=call.operation,
                    sequence=int(row["p2p_sequence"]),
                    waiting=(rank,),
                    absent=() if exchanges.is_answered(rank, row) else (peer,),
                    since_ns=int(row["created_ns"]),
                    age_s=_age_s(evidence, rank, row),
                    is_p2p=True,
                    peer=peer,
                    members=2,
                )
            )
    return waits


def _most_common(names: Sequence[str]) -> str:
    return max(sorted(set(names)), key=list(names).count)


def _components(successors: Mapping[Any, Sequence[Any]]) -> list[list[Any]]:
    """Return the strongly connected components (Tarjan's algorithm, without recursion)."""
    index: dict[Any, int] = {}
    low: dict[Any, int] = {}
    stack: list[Any] = []
    on_stack: set[Any] = set()
    found: list[list[Any]] = []
    for root in list(successors):
        if root in index:
            continue
        work: list[tuple[Any, int]] = [(root, 0)]
        while work:
            node, position = work.pop()
            if position == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            below = successors.get(node, ())
            for place in range(position, len(below)):
                other = below[place]
                if other not in index:
                    work += [(node, place + 1), (other, 0)]
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                if low[node] == index[node]:
                    found.append(_pop_component(node, stack, on_stack))
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
    return found


def _pop_component(node: Any, stack: list[Any], on_stack: set[Any]) -> list[Any]:
    component: list[Any] = []
    while True:
        member = stack.pop()
        on_stack.discard(member)
        component.append(member)
        if member == node:
            return component
