"""Keep a node ready to take over the job.

In a job with failover, every node, including the host, has a `Standby`. It opens a listener at the
start of the job, so that the port is certain to be available for a takeover. Votes are cast on the
listener's thread; all other work runs in the agent's event loop.
"""

from __future__ import annotations

import threading

from echelon.launcher.control import messages as m
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.server import ControlServer
from echelon.launcher.control.tls import TlsFiles
from echelon.launcher.election.candidacy import Candidacy
from echelon.launcher.election.canvasser import Canvasser
from echelon.launcher.election.elector import Elector
from echelon.launcher.election.lease import Permit, now_s
from echelon.launcher.election.mandate import Mandate, unpack_mandate
from echelon.launcher.election.polls import answer_of, asked_of, poll_of, vote_of

_OVERDUE_SHARE = 0.75  # of the promise, so that ranks are examined before their permit expires


class Standby:
    """Lets one node follow the host, and replace the host if it is lost.

    Args:
        name: the node's own name.
        bind_address: the "host:port" that the node listens on.
        promise_s: how long this node's promise lasts after each heartbeat, in seconds. The value
            in the host's heartbeats takes precedence.
        is_open: whether this node hosts the job from the start.

    Attributes:
        server: the listener.
        former: the name of the host that was lost most recently; "" if none was lost.
        events: the messages that nodes send to this node while it is the host.

    Raises:
        LaunchError: the address cannot be bound.
    """

    def __init__(
        self,
        name: str,
        bind_address: str,
        secret: bytes,
        *,
        promise_s: float,
        tls: TlsFiles | None,
        is_open: bool,
    ) -> None:
        self.name = name
        self.promise_s = promise_s
        self.permit = Permit()
        self._elector = Elector(name, promise_s)
        self._lock = threading.Lock()  # of the elector
        self._candidacy: Candidacy | None = None
        self.former = ""
        self._canvasser: Canvasser | None = None
        self._secret, self._tls = secret, tls
        self.events: Mailbox[tuple[str, m.Event]] = Mailbox()
        self.server = ControlServer(
            bind_address, secret, self.events, tls=tls, lost_after_s=promise_s, answer=self._answer,
            is_open=is_open,
        )  # fmt: skip

    @property
    def term(self) -> int:
        """The latest term that this node has seen."""
        return self._elector.term

    @property
    def mandate(self) -> Mandate | None:
        """The latest mandate that this node holds, or None."""
        return self._elector.mandate

    @property
    def candidacy(self) -> Candidacy | None:
        """This node's search for a host; None while the node has a host."""
        return self._candidacy

    def close(self) -> None:
        """Close the listener once pending messages have been sent."""
        if self._canvasser is not None:
            self._canvasser.close()
        self.server.close()
        self.events.close()

    # ---- with a host ----

    def on_beat(self, beat: m.LeaseBeat) -> m.LeaseReply:
        """Handle a host's heartbeat and return the reply."""
        with self._lock:
            self.promise_s = self._elector.promise_s = beat.promise_ms / 1e3
            if self._elector.on_beat(beat.term, beat.host, now_s()):
                self.permit.extend(beat.echo, beat.remaining_ms / 1e3)
        return self._reply(beat.number)

    def on_entrust(self, command: m.Entrust) -> m.LeaseReply:
        """Store a mandate from a host and return the reply.

        Raises:
            LaunchError: the mandate is malformed.
        """
        self.keep(unpack_mandate(command.mandate))
        return self._reply(0)

    def keep(self, mandate: Mandate) -> None:
        """Store a mandate written by this node or by another host."""
        with self._lock:
            self._elector.on_mandate(mandate)

    def hold(self, term: int) -> None:
        """Renew this host's promise to itself, so that it does not vote for another node."""
        with self._lock:
            self._elector.on_beat(term, self.name, now_s())

    def _reply(self, number: int) -> m.LeaseReply:
        with self._lock:
            term, version = self._elector.term, self._elector.version
        stamp = self.permit.stamp(now_s())
        return m.LeaseReply(term=term, number=number, stamp=stamp, version=list(version))

    # ---- without one ----

    @property
    def is_overdue(self) -> bool:
        """True if the current host has sent no heartbeat for 75% of the promise's duration."""
        elector = self._elector
        if self._candidacy is not None or elector.host in ("", self.name):
            return False
        return elector.free_s(now_s()) < (1 - _OVERDUE_SHARE) * self.promise_s

    def lose_host(self, *, is_dead: bool) -> None:
        """Begin searching for another host.

        Args:
            is_dead: whether the lost host's machine refuses connections, which proves that the
                launcher on that host has exited.
        """
        with self._lock:
            term = self._elector.term
            if self._elector.host not in ("", self.name):
                self.former = self._elector.host
            self._elector.lose_host(is_dead=is_dead)
            self._candidacy = Candidacy(self._elector, term, now_s())
        if self._canvasser is None:
            self._canvasser = Canvasser(self._secret, self._tls)

    def found_host(self) -> None:
        """End the search for a host, because it has succeeded."""
        self._candidacy = None

    def seek(self) -> Candidacy | None:
        """Process votes and send due polls; return the current search, or None if there is none."""
        candidacy, canvasser, mandate = self._candidacy, self._canvasser, self.mandate
        if candidacy is None or canvasser is None or mandate is None:
            return candidacy
        with self._lock:
            for name, poll, vote in canvasser.votes.take():
                candidacy.on_answer(name, asked_of(poll), answer_of(vote), now_s())
            asked = candidacy.due(now_s())
        if asked is not None:
            for name in mandate.electors:
                member = mandate.member(name)
                if name != self.name and member is not None:
                    canvasser.ask(name, member.endpoint, poll_of(asked, mandate.founder))
        return candidacy

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when votes arrive.

        Call this only after `lose_host`.
        """
        assert self._canvasser is not None
        return self._canvasser.votes.fileno()

    def _answer(self, question: m.Event | m.Command) -> m.Vote | None:
        if not isinstance(question, m.Poll):
            return None
        with self._lock:
            return vote_of(self._elector.on_canvass(asked_of(question), now_s()))
