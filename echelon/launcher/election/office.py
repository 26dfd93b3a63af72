"""Maintain the host's state: its lease, its mandate, and the permits of its nodes.

See `lease.py` for leases and permits, and `mandate.py` for the mandate.

A world can begin once all three conditions are met:

- A majority of the former electors and a majority of the next electors hold the world's mandate.
- The host's lease is still valid.
- Every rank of the previous world is dead, or the permit of its node has expired.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from echelon.launcher.election.lease import Lease, beat_interval_s
from echelon.launcher.election.mandate import WITNESS, Mandate, Member, electors_of

KILL_S = 1.0  # the time that the kernel needs once a guard kills ranks whose permit has expired


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A host's heartbeat to a node.

    Attributes:
        echo: the stamp of the last reply that the host received from the node; 0 for none.
        holds: in a heartbeat to the witness, whether the host's lease is valid even without the
            witness's replies.
    """

    term: int
    host: str
    number: int
    echo: int
    remaining_ms: int
    holds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A node's reply to a heartbeat or a mandate.

    Attributes:
        number: the number of the heartbeat; 0 if this is the reply to a mandate.
        stamp: the number of this reply.
        version: the version of the mandate that the node holds.
    """

    term: int
    number: int
    stamp: int
    version: tuple[int, int]


@dataclass(slots=True)
class _Node:
    stamp: int = 0
    index: int = -1
    replied_s: float = float("-inf")
    permit_ends_s: float = float("-inf")  # at the latest


class Office:
    """The state of the host `name` during one term.

    Args:
        mandate: the mandate with which the term begins. An elected host begins with the former
            host's mandate.
        promise_s: how long an elector's promise lasts, in seconds.
    """

    def __init__(self, name: str, term: int, mandate: Mandate, promise_s: float) -> None:
        self.name = name
        self.term = term
        self.promise_s = promise_s
        self.mandate = replace(mandate, term=term, index=0)
        self.is_deposed = False
        self._is_following = False  # whether a change of the witness is in progress
        self._next = self.mandate.electorates[-1]  # the only electorate once it is settled
        self._lease = Lease(name, promise_s)
        self._nodes: dict[str, _Node] = {}
        self._next_beat_s = float("-inf")

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the connected nodes other than the hosting node."""
        return tuple(self._nodes)

    # ---- beats ----

    def add(self, name: str) -> None:
        """Start sending heartbeats to a node that has connected."""
        permit_ends_s = self._nodes[name].permit_ends_s if name in self._nodes else float("-inf")
        self._nodes[name] = _Node(permit_ends_s=permit_ends_s)
        self._next_beat_s = float("-inf")

    def remove(self, name: str) -> float:
        """Forget a lost node; return the time by which its ranks are certain to be dead."""
        node = self._nodes.pop(name, None)
        return float("-inf") if node is None else node.permit_ends_s + KILL_S

    def deadline_s(self) -> float:
        """Return the time at which the next heartbeat is due."""
        return self._next_beat_s

    def beats(self, now_s: float) -> list[tuple[str, Beat]]:
        """Return the heartbeats that are due, as (node, heartbeat) pairs."""
        if now_s < self._next_beat_s:
            return []
        self._next_beat_s = now_s + beat_interval_s(self.promise_s)
        number = self._lease.beat(now_s)
        return [(name, self._beat(name, number, now_s)) for name in self._nodes]

    def beat_to(self, names: Iterable[str], now_s: float) -> list[tuple[str, Beat]]:
        """Return an extra heartbeat for each given node, to renew the permits immediately."""
        number = self._lease.beat(now_s)
        return [(name, self._beat(name, number, now_s)) for name in names if name in self._nodes]

    def _beat(self, name: str, number: int, now_s: float) -> Beat:
        node = self._nodes[name]
        remaining_ms = int(self.remaining_s(now_s) * 1e3)
        if node.stamp:
            ends_s = node.replied_s + remaining_ms / 1e3
            node.permit_ends_s = max(node.permit_ends_s, ends_s)
        return Beat(
            term=self.term, host=self.name, number=number, echo=node.stamp,
            remaining_ms=remaining_ms,
            holds=name == WITNESS and self._holds_without_witness(now_s),
        )  # fmt: skip

    def _holds_without_witness(self, now_s: float) -> bool:
        electorates = self.mandate.electorates
        lasts = self._lease.remaining_s(electorates, now_s, without=WITNESS) > 0
        return lasts and not self.is_deposed

    def is_heard(self, name: str, now_s: float) -> bool:
        """Return whether a node has replied within the last `promise_s` seconds."""
        node = self._nodes.get(name)
        return node is not None and now_s - node.replied_s < self.promise_s

    def on_reply(self, name: str, reply: Reply, now_s: float) -> None:
        """Handle a node's reply to a heartbeat or a mandate."""
        if reply.term > self.term:
            self.is_deposed = True
        node = self._nodes.get(name)
        if node is None or reply.term != self.term:
            return
        self._lease.acknowledge(name, reply.number)
        if reply.stamp > node.stamp:
            node.stamp, node.replied_s = reply.stamp, now_s
        if reply.version[0] == self.term:
            node.index = max(node.index, reply.version[1])

    def remaining_s(self, now_s: float) -> float:
        """Return the number of seconds until this host's lease expires; 0 if it is not valid."""
        if self.is_deposed:
            return 0.0
        return self._lease.remaining_s(self.mandate.electorates, now_s)

    # ---- the mandate ----

    def propose(
        self,
        members: Sequence[Member],
        *,
        attempt: int,
        restarts: int,
        num_attempts: int,
        has_witness: bool = False,
        memory: str | None = None,
    ) -> None:
        """Write the mandate of the next world.

        Until `settle` is called, decisions also need a majority of the former electors.

        Args:
            members: the nodes of the next world, in rank order.
            has_witness: whether the job's witness responds.
            memory: the restart policy's memory; None means the memory in the current mandate.
        """
        self._is_following = False
        electors = self._next = electors_of(members, self.name, has_witness=has_witness)
        former = self.mandate.electorates
        names = {one.name for one in members}
        names.add(WITNESS)
        others = [self.mandate.member(name) for name in self.mandate.electors if name not in names]
        self.mandate = replace(
            self.mandate,
            index=self.mandate.index + 1,
            members=tuple(members),
            others=tuple(one for one in others if one is not None),
            electorates=former if electors in former else (*former, electors),
            attempt=attempt,
            restarts=restarts,
            num_attempts=num_attempts,
            memory=self.mandate.memory if memory is None else memory,
        )

    def remember(self, *, restarts: int, num_attempts: int, memory: str) -> None:
        """Update the restart counts and the restart policy's memory in the current mandate."""
        self.mandate = replace(
            self.mandate,
            index=self.mandate.index + 1,
            restarts=restarts,
            num_attempts=num_attempts,
            memory=memory,
        )

    def withdraw(self) -> bool:
        """Drop the proposed electors if the host was the only elector before the proposal.

        Return whether they were dropped.
        """
        electorates = self.mandate.electorates
        alone = ((self.name,),)
        if len(electorates) == 1 or electorates[:1] != alone:
            return False
        self.mandate = replace(
            self.mandate, index=self.mandate.index + 1, others=(), electorates=alone
        )
        self._next = alone[0]
        return True

    def is_held(self) -> bool:
        """Return whether a majority of each electorate holds the current mandate."""
        index = self.mandate.index
        return self.mandate.is_majority(
            {self.name, *(name for name, node in self._nodes.items() if node.index >= index)}
        )

    def is_held_by(self, names: Iterable[str]) -> bool:
        """Return whether all of the given nodes hold the current mandate."""
        index = self.mandate.index
        return all(
            name == self.name or (name in self._nodes and self._nodes[name].index >= index)
            for name in names
        )

    def follow_witness(self, now_s: float) -> bool:
        """Make the witness an elector while it responds, and drop it from the electors otherwise.

        Call this only while a world is running. Return whether the mandate changed and
        must therefore be sent to the other nodes.
        """
        mandate = self.mandate
        if self._is_following:
            if not self.is_held():
                return False
            self._is_following = False
            self.settle()
            return True
        has_witness = self.is_heard(WITNESS, now_s)
        electors = electors_of(mandate.members, self.name, has_witness=has_witness)
        if mandate.electorates == (electors,):
            return False
        self.propose(
            mandate.members, attempt=mandate.attempt, restarts=mandate.restarts,
            num_attempts=mandate.num_attempts, has_witness=has_witness,
        )  # fmt: skip
        self._is_following = True
        return True

    def settle(self) -> None:
        """Drop the former electors. Call this only after `is_held` has returned True."""
        electorates = (self._next,)
        if self.mandate.electorates != electorates:
            self.mandate = replace(
                self.mandate, index=self.mandate.index + 1, others=(), electorates=electorates
            )
