"""Prepare an elected host to take over the job.

The host makes no decisions until a majority of the electors hold its mandate. Reports from nodes
are queued until the coordinator starts. The coordinator takes over once all nodes of the last world
have connected or timed out. If the host does not obtain a lease in time, it becomes an ordinary
node again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from echelon.launcher.control import messages as m
from echelon.launcher.election.lease import now_s
from echelon.launcher.election.mandate import WITNESS, Mandate, pack_mandate
from echelon.launcher.election.office import KILL_S, Beat, Office, Reply

_ASSEMBLE_S = 3.0  # for the nodes of the last world
_VOTERS_S = 15.0  # for those known to be alive, which may still be examining their ranks
Send = Callable[[str, m.Command], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inheritance:
    """The state from which a new coordinator continues the job.

    Attributes:
        mandate: the former host's last mandate.
        former: the former host's name.
        hellos: the greetings of the connected nodes.
        events: what these nodes have reported since they connected, as (node, event) pairs.
        fenced_until_s: the time by which all ranks of nodes that have not connected are certain to
            be dead, on the clock of `lease.now_s`.
    """

    mandate: Mandate
    former: str
    hellos: tuple[m.Hello, ...]
    events: tuple[tuple[str, m.Event], ...]
    fenced_until_s: float


class Takeover:
    """The state of an elected host until its coordinator starts.

    Args:
        office: the elected host's lease and mandate.
        mandate: the former host's last mandate.
        former: the name of the lost host.
        voters: the electors that voted for the elected host.
        was_early: whether the former host's lease might still have been valid when this host was
            elected.
        send: sends a command to a node.
    """

    def __init__(
        self,
        office: Office,
        mandate: Mandate,
        former: str,
        *,
        voters: frozenset[str],
        was_early: bool,
        send: Send,
    ) -> None:
        self._voters = voters
        self.office = office
        self._mandate = mandate
        self._former = former
        self._send = send
        self._hellos: dict[str, m.Hello] = {}
        self._events: list[tuple[str, m.Event]] = []
        if mandate.witness:
            office.add(WITNESS)
        self._began_s = now_s()
        # A dead launcher's guard also takes a moment; a node that is cut off keeps its permit.
        self._ranks_end_s = self._began_s + (2 if was_early else 1) * KILL_S
        self._permits_end_s = self._ranks_end_s + (office.promise_s if was_early else 0.0)

    @property
    def has_failed(self) -> bool:
        """True if this host did not obtain its lease in time, or if another host was elected."""
        late = now_s() > self._began_s + max(self.office.promise_s, _VOTERS_S)
        return self.office.is_deposed or (late and self.office.remaining_s(now_s()) <= 0)

    def deadline_s(self) -> float:
        """Return the time at which to call `step` next, on the clock of `lease.now_s`."""
        return min(self.office.deadline_s(), now_s() + 0.1)

    def step(self, events: Iterable[tuple[str, m.Event]]) -> Inheritance | None:
        """Process events and send due heartbeats; return the inherited state once it is complete.

        Until then, return None.
        """
        for name, event in events:
            self._take(name, event)
        for name, beat in self.office.beats(now_s()):
            self._send(name, beat_message(beat, self.office.promise_s))
        others = [one.name for one in self._mandate.members if one.name != self._former]
        missing = {name for name in others if name not in self._hellos}
        assembled = not missing
        patience_s = _VOTERS_S if missing & self._voters else _ASSEMBLE_S
        if missing and now_s() < self._began_s + patience_s:
            return None
        if not self.office.is_held() or self.office.remaining_s(now_s()) <= 0:
            return None
        return Inheritance(
            mandate=self._mandate,
            former=self._former,
            hellos=tuple(self._hellos.values()),
            events=tuple(self._events),
            fenced_until_s=self._ranks_end_s if assembled else self._permits_end_s,
        )

    def _take(self, name: str, event: m.Event) -> None:
        if isinstance(event, m.Hello):
            self._hellos[name] = event
            self._events = [one for one in self._events if one[0] != name]
            if name != self.office.name:
                self.office.add(name)
                self._send(name, m.Entrust(mandate=pack_mandate(self.office.mandate)))
        elif isinstance(event, m.LeaseReply):
            self.office.on_reply(name, reply_of(event), now_s())
        elif isinstance(event, m.Left):
            self._hellos.pop(name, None)
            self.office.remove(name)
        else:
            self._events.append((name, event))


def beat_message(beat: Beat, promise_s: float) -> m.LeaseBeat:
    """Return the `LeaseBeat` message for a heartbeat."""
    return m.LeaseBeat(
        term=beat.term, host=beat.host, number=beat.number, echo=beat.echo,
        remaining_ms=beat.remaining_ms, promise_ms=int(promise_s * 1e3), holds=beat.holds,
    )  # fmt: skip


def reply_of(event: m.LeaseReply) -> Reply:
    """Return the reply that a `LeaseReply` message contains."""
    first, second = (*event.version, -1, -1)[:2]
    return Reply(term=event.term, number=event.number, stamp=event.stamp, version=(first, second))
