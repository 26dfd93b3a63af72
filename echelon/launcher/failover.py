"""Make a node follow the hosting node, and replace the hosting node if it is lost.

Each heartbeat from the hosting node extends the permit that allows this node's ranks to run. The
guard kills the ranks when the permit expires. If the hosting node is lost, this node takes a
snapshot of its ranks, stops them and searches for a new hosting node. If the electors elect this
node, it becomes the hosting node.

    following --link lost--> seeking --another is elected--> following
                                     --elected--> taking over --lease held--> hosting
                                     --no majority in time--> the node stops alone
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from echelon.launcher.control import messages as m
from echelon.launcher.control.client import GrpcLink
from echelon.launcher.control.endpoint import join, split
from echelon.launcher.control.link import Link
from echelon.launcher.election.candidacy import Candidacy
from echelon.launcher.election.lease import now_s
from echelon.launcher.election.mandate import Mandate, Member
from echelon.launcher.election.office import Office
from echelon.launcher.election.standby import Standby
from echelon.launcher.election.succession import Succession
from echelon.launcher.election.takeover import Takeover
from echelon.launcher.hosting import Hosting
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.node import NodeAgent
from echelon.launcher.node.workers import Workers
from echelon.launcher.options.options import Options
from echelon.launcher.output.output import Terminal

_SEEK_S = 6.0  # in addition to the promise that electors must wait out
_RELINK_S = 3.0
_POLL_S = 0.05
_LEAST_MOVE_S = 0.2  # a smaller extension of the fence is not worth a message
_STANDSTILL_S = 1.0  # the loop runs at least twice as often
_HEAR_S = 0.3  # after a standstill, beats that arrived during it must be read first


class Failover:
    """The failover logic of one node.

    Args:
        hello: the network message with which this node introduces itself to a hosting node.

    Attributes:
        hosting: the services that this node runs once it is the hosting node; None before that.
    """

    def __init__(
        self,
        options: Options,
        directory: RunDirectory,
        terminal: Terminal,
        standby: Standby,
        guard: Workers,
        hello: m.Hello,
        hosting: Hosting | None = None,
    ) -> None:
        assert options.rendezvous is not None
        self._options = options
        self._meeting = options.rendezvous
        self._directory = directory
        self._terminal = terminal
        self._standby = standby
        self._guard = guard
        self._hello = hello
        self._takeover: Takeover | None = None
        self._world_term = -1  # of the host that started this node's ranks
        self._fence_s = float("-inf")
        self._give_up_s: float | None = None  # monotonic
        self._looked_s = self._woke_s = float("-inf")  # monotonic
        self.hosting = hosting

    # ---- with a host ----

    def on_command(self, command: m.Command, link: Link, node: NodeAgent) -> bool:
        """Handle a command if it concerns failover; return whether it has been fully handled."""
        if isinstance(command, m.LeaseBeat):
            self._give_up_s = None
            link.send(self._standby.on_beat(command))
            self._extend(self._standby.permit.expires_s, command.term, node)
            return True
        if isinstance(command, m.Entrust):
            link.send(self._standby.on_entrust(command))
            return True
        if isinstance(command, m.Start):
            self._prepare(node)
        return False

    def _prepare(self, node: NodeAgent) -> None:
        """Kill any ranks that are still running, and set the permit under which new ranks run."""
        if node.has_workers:
            node.kill()
            node.clear_up()
        self._world_term = self._standby.term
        self._fence_s = float("-inf")
        succession = None if self.hosting is None else self.hosting.succession
        until_s = self._standby.permit.expires_s
        if succession is not None:
            until_s = now_s() + succession.remaining_s()
        self._extend(until_s, self._world_term, node)

    def _extend(self, until_s: float, term: int, node: NodeAgent) -> None:
        """Extend the permit, unless this node's ranks were started in a term other than `term`."""
        if node.has_workers and term != self._world_term:
            return
        if until_s > self._fence_s + _LEAST_MOVE_S:
            self._fence_s = until_s
            self._guard.fence(until_s)

    # ---- without one ----

    def lose_host(self, why: str, node: NodeAgent) -> bool:
        """Start or continue the search for a new hosting node.

        Return False if the hosting node cannot be replaced or the search has taken too long.
        """
        mandate = self._standby.mandate
        if mandate is None or not mandate.survives_host or mandate.member(self._hello.node) is None:
            return False
        is_first = self._give_up_s is None
        if self._give_up_s is None:
            self._give_up_s = time.monotonic() + self._standby.promise_s + _SEEK_S
        if time.monotonic() >= self._give_up_s:
            return False
        self._standby.lose_host(is_dead="refused" in why)
        if is_first:
            self._terminal.say(
                f"lost the hosting node ({why}); the {len(mandate.electors)} electing nodes "
                "are choosing another"
            )
            node.keep_snapshot()
            left_ms = int(max(0.0, self._fence_s - now_s()) * 1e3)
            grace_ms = min(left_ms, int(self._options.shutdown_timeout_s * 1e3))
            node.stop(m.Stop(number=signal.SIGTERM, grace_ms=grace_ms, urgent=True))
        return True

    def is_overdue(self) -> bool:
        """Return whether the hosting node counts as lost although the link to it is still open.

        Call this on each iteration of the event loop.
        """
        moment_s = time.monotonic()
        if moment_s > self._looked_s + _STANDSTILL_S:
            self._woke_s = moment_s
        self._looked_s = moment_s
        if moment_s < self._woke_s + _HEAR_S:
            return False
        mandate = self._standby.mandate
        return self._standby.is_overdue and mandate is not None and mandate.survives_host

    @property
    def is_seeking(self) -> bool:
        """True while this node, after losing the hosting node, searches for a new one."""
        return self._standby.candidacy is not None

    @property
    def has_given_up(self) -> bool:
        """True if the time limit for this node's search for a new hosting node has expired."""
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def deadline_s(self) -> float:
        """Return the `time.monotonic` time at which to call `seek` or `step` again."""
        if self.is_seeking or self._takeover is not None:
            return time.monotonic() + _POLL_S
        return float("inf")

    def seek(self, node: NodeAgent) -> Link | None:
        """Continue the search for a new hosting node; once a node is found, return a link to it.

        This node itself may be the new hosting node.
        """
        candidacy = self._standby.seek()
        if candidacy is None or not (candidacy.found or candidacy.is_elected):
            return None
        mandate = self._standby.mandate
        assert mandate is not None
        self._standby.found_host()
        if node.has_workers and node.attempt != mandate.attempt:
            node.kill()  # its world is unknown to the next host
            node.clear_up()
        if candidacy.found is not None:
            return self._follow(candidacy.found[0], node)
        return self._take_over(candidacy, mandate)

    def _follow(self, endpoint: str, node: NodeAgent) -> Link:
        self._terminal.say(f"following the host at {endpoint}")
        return GrpcLink(
            endpoint,
            self._meeting.secret,
            replace(self._hello, holds=node.attempt),
            _RELINK_S,
            tls=self._options.tls,
            lost_after_s=self._standby.promise_s,
            is_last=False,
        )

    def _take_over(self, candidacy: Candidacy, mandate: Mandate) -> Link:
        """Begin to take over as the hosting node, and accept connections from the other nodes."""
        name = self._hello.node
        member = mandate.member(name)
        assert member is not None
        host, port = split(member.endpoint)
        self._terminal.say(f"elected to host the job, at {join(host, port)}")
        serving = replace(self._meeting, host=host, port=port, is_host=True)
        standby = self._standby
        if self.hosting is not None:
            self.hosting.close()
        standby.events.take()  # left from an earlier takeover
        self.hosting = Hosting(
            replace(self._options, rendezvous=serving),
            self._directory,
            Report(job_id=mandate.job_id, world_size=0),
            self._terminal,
            standby.events,
        )
        self.hosting.server = standby.server
        office = Office(name, candidacy.term, mandate, standby.promise_s)
        standby.keep(office.mandate)
        self.hosting.call_witness(office.mandate)
        self._takeover = Takeover(
            office,
            mandate,
            standby.former,
            voters=candidacy.voters,
            was_early=candidacy.was_early,
            send=self.hosting.send,
        )
        standby.server.open(is_open=True)
        return self.hosting.link

    def greet(self, link: Link, node: NodeAgent) -> None:
        """Report this node's state to the new hosting node."""
        if self._takeover is not None:
            link.send(replace(self._hello, holds=node.attempt))
        node.report_again()

    # ---- as the host ----

    def step(self, node: NodeAgent) -> None:
        """Continue a takeover or, once it is complete, extend the permit of this node's ranks."""
        hosting, takeover = self.hosting, self._takeover
        if hosting is None:
            return
        if takeover is not None:
            self._take_over_on(hosting, takeover)
        elif hosting.succession is not None:
            until_s = now_s() + hosting.succession.remaining_s()
            self._extend(until_s, self._standby.term, node)

    def _take_over_on(self, hosting: Hosting, takeover: Takeover) -> None:
        inherited = takeover.step(hosting.events.take())
        has_store = hosting.has_store(self._meeting.secret.decode())
        if inherited is not None and has_store:
            self._takeover = self._give_up_s = None
            mandate = inherited.mandate
            here, all_of_it = len(inherited.hellos), len(mandate.members)
            self._terminal.say(f"hosting the job with {here} of its {all_of_it} nodes")
            own = mandate.member(self._hello.node)
            assert own is not None
            office, standby = takeover.office, self._standby
            hosting.begin(
                Succession(
                    office, standby, own.endpoint, hosting.send, self._terminal.say, inherited
                )
            )
        elif takeover.has_failed:
            self._terminal.say("no majority follows this node; looking for another host")
            self._takeover = None
            self._standby.server.open(is_open=False)
            self._standby.lose_host(is_dead=False)


def first_succession(
    options: Options, standby: Standby, hosting: Hosting, job_id: str
) -> Succession:
    """Create the failover logic of the first hosting node, which is initially the only elector."""
    meeting = options.rendezvous
    assert meeting is not None
    name = options.node_name
    own = Member(
        name=name, host="", endpoint=meeting.address, num_workers=options.nproc_per_node,
        node_rank=options.node_rank,
    )  # fmt: skip
    mandate = Mandate(
        term=0, index=0, electorates=((name,),), members=(own,), job_id=job_id,
        witness=options.witness, founder=name,
    )  # fmt: skip
    hosting.call_witness(mandate)
    office = Office(name, 0, mandate, standby.promise_s)
    return Succession(office, standby, meeting.address, hosting.send, hosting.say)
