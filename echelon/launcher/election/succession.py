"""In a job with failover, decide when the host may begin a world and when it must stop.

A host must stop once its lease has expired, because the other nodes can then elect another host.
This module also sends the host's heartbeats and mandates, and fences lost nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from echelon.launcher.control import messages as m
from echelon.launcher.control.endpoint import join
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.election.fences import Fences
from echelon.launcher.election.lease import now_s
from echelon.launcher.election.mandate import WITNESS, Mandate, Member, pack_mandate
from echelon.launcher.election.office import Office
from echelon.launcher.election.standby import Standby
from echelon.launcher.election.takeover import Inheritance, beat_message, reply_of

_WITNESS_S = 2.0
Send = Callable[[str, m.Command], None]


class Succession:
    """The failover logic of a job's current host.

    Args:
        office: the host's lease and mandate.
        standby: the `Standby` of the host's own node.
        endpoint: the "host:port" at which other nodes connect to this host.
        send: sends a command to a node.
        say: prints a line for the user.
        inherited: the state that was taken over from the former host; None for a job's first host.
    """

    def __init__(
        self,
        office: Office,
        standby: Standby,
        endpoint: str,
        send: Send,
        say: Callable[[str], None],
        inherited: Inheritance | None = None,
    ) -> None:
        self._office = office
        self._standby = standby
        self._send = send
        self._say = say
        self._endpoints = {office.name: endpoint}
        self._fences = Fences()
        self._proposed: tuple[str, ...] = ()
        self._held_s = now_s()
        self.inherited = inherited
        self.waits_for = ""
        self._has_world = False
        self._witness_due_s = float("-inf")  # how long a world waits for its first answer
        if office.mandate.witness:
            office.add(WITNESS)
            self._witness_due_s = now_s() + _WITNESS_S
        if inherited is not None:
            self._fences.wait_until("former world", inherited.fenced_until_s)

    @property
    def mandate(self) -> Mandate:
        """The current mandate."""
        return self._office.mandate

    def remaining_s(self) -> float:
        """Return how many seconds this host's lease remains valid; 0 if it is no longer valid."""
        return self._office.remaining_s(now_s())

    def deadline_s(self) -> float:
        """Return the `time.monotonic` time at which to call `step` next."""
        due = self._office.deadline_s()
        if self.waits_for:
            due = min(due, max(self._fences.until_s(), now_s() + 0.1))
        return time.monotonic() + due - now_s()

    def admit(self, hello: m.Hello) -> None:
        """Start sending heartbeats to a node that has connected."""
        if hello.node == self._office.name:
            return
        self._endpoints[hello.node] = join(hello.address, hello.port) if hello.port else ""
        self._office.add(hello.node)
        self._send(hello.node, m.Entrust(mandate=pack_mandate(self.mandate)))

    def lose(self, name: str) -> None:
        """Handle the loss of a node: fence it, and withdraw a proposed world that includes it."""
        ends_s = self._office.remove(name)
        self._fences.lose(name, self._endpoints.get(name, ""), ends_s, now_s())
        if name in self._proposed:
            self._proposed = ()
            if self._office.withdraw():
                self._publish()

    def on_reply(self, name: str, event: m.LeaseReply) -> None:
        """Handle a node's reply to a heartbeat or a mandate."""
        self._office.on_reply(name, reply_of(event), now_s())

    def step(self) -> None:
        """Send due heartbeats, and make the witness an elector only while it responds."""
        office = self._office
        if office.remaining_s(now_s()) > 0:
            self._held_s = now_s()
            self._standby.hold(office.term)
        for name, beat in office.beats(now_s()):
            self._send(name, beat_message(beat, self._office.promise_s))
        if self._has_world and office.mandate.witness and office.follow_witness(now_s()):
            self._publish()
            if len(self.mandate.electorates) == 1:
                self._say_majority(len(self.mandate.members))

    def why_lapsed(self, *, has_world: bool) -> str:
        """Return why this host must stop; "" if it can continue.

        While no ranks are running, the host may continue for another `promise_s` seconds after its
        lease has expired, so that nodes can reconnect.

        Args:
            has_world: whether ranks are running.
        """
        if self._office.is_deposed:
            return "another node was elected to host the job"
        patience_s = 0.0 if has_world else self._office.promise_s
        if self.remaining_s() > 0 or now_s() <= self._held_s + patience_s:
            return ""
        electors = self.mandate.electors
        return (
            f"no majority of the {len(electors)} electing nodes answers; "
            "they may continue without this node"
        )

    def may_begin(
        self,
        nodes: Sequence[Node],
        *,
        attempt: int,
        restarts: int,
        num_attempts: int,
        memory: str = "",
    ) -> bool:
        """Return whether a world of the given nodes can begin; propose the world if it is new.

        A world can begin once all of its nodes and a majority of the electors hold its mandate, all
        ranks of lost nodes are certain to be dead, and this host's lease is valid.
        """
        if now_s() < self._witness_due_s and not self._office.is_heard(WITNESS, now_s()):
            self.waits_for = "an answer from the witness"
            return False
        names = tuple(node.name for node in nodes)
        if names != self._proposed:
            self._proposed = names
            members = [self._member(node) for node in nodes]
            self._has_world = False
            self._office.propose(
                members, attempt=attempt, restarts=restarts, num_attempts=num_attempts,
                has_witness=self._office.is_heard(WITNESS, now_s()), memory=memory,
            )  # fmt: skip
            self._publish()
        office = self._office
        if not office.is_held() or not office.is_held_by(names):
            self.waits_for = "confirmation of the next world by its nodes"
        elif now_s() < self._fences.until_s():
            self.waits_for = "certainty that the ranks of a lost node have ended"
        else:
            self.waits_for = ""
        return not self.waits_for and self.remaining_s() > 0

    def remember(self, *, restarts: int, num_attempts: int, memory: str) -> None:
        """Send all nodes a new mandate with the restart counts and the policy's saved state."""
        self._office.remember(restarts=restarts, num_attempts=num_attempts, memory=memory)
        self._publish()

    def begin(self, nodes: Sequence[Node]) -> None:
        """Drop the former electors as the world starts, and renew the permits of its nodes."""
        self._proposed = ()
        self._office.settle()
        self._publish()
        self._has_world = True
        self._say_majority(len(nodes))
        for name, beat in self._office.beat_to([node.name for node in nodes], now_s()):
            self._send(name, beat_message(beat, self._office.promise_s))

    def _say_majority(self, num_nodes: int) -> None:
        """Print whether another node could take over if this host were lost."""
        mandate = self.mandate
        if WITNESS in mandate.electors:
            self._say(f"the witness at {mandate.witness} votes: another node may replace this one")
        elif num_nodes > 1 and not mandate.survives_host:
            missing = f" (the witness at {mandate.witness} does not answer)"
            self._say(
                f"a world of {num_nodes} nodes has no majority without its host: "
                f"the loss of this node ends the job{missing if mandate.witness else ''}"
            )

    def _member(self, node: Node) -> Member:
        return Member(
            name=node.name, host=node.host, endpoint=self._endpoints.get(node.name, ""),
            num_workers=node.num_workers, node_rank=node.node_rank,
        )  # fmt: skip

    def _publish(self) -> None:
        """Store the mandate on this node, and send it to all other nodes."""
        self._standby.keep(self.mandate)
        packed = m.Entrust(mandate=pack_mandate(self.mandate))
        for name in self._office.nodes:
            self._send(name, packed)
