"""Check a job's nodes before the job starts: their connections, software versions and clocks.

Every node runs `echelon doctor` with the options that it will pass to `echelon run`. The nodes
connect to the endpoint, as they do in a job. Each node also listens on a free port, to which every
other node connects.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import platform
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from echelon import __version__
from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.control.client import GrpcLink
from echelon.launcher.control.endpoint import Rendezvous
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.server import ControlServer
from echelon.launcher.control.tls import TlsFiles
from echelon.launcher.doctor.probes.child import run_all
from echelon.launcher.doctor.probes.finding import Task
from echelon.launcher.doctor.probes.pair import GREETING, Listener, new_token

_NUM_TICKS = 8
_TICK_S = 2.0
_CONNECT_S = 3.0
_WAYS_S = 20.0
_NEXT_S = 60.0  # between two of the host's requests
_NUM_AT_ONCE = 32
_CLOCK_S = 1.0  # a larger difference confuses people who compare logs, and other tools

T = TypeVar("T", bound=m.Event)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check, printed as one line."""

    name: str
    text: str
    ok: bool = True


@dataclass(slots=True)
class Member:
    """A node that takes part in the checks."""

    name: str  # the name of its session, "" for the host itself
    about: m.CheckIn
    ahead_s: float | None = None  # of the host's wall clock; None if it did not answer
    error_s: float = 0.0
    troubles: list[str] = field(default_factory=list)  # broken links from this node
    has_tried: bool = False


Measure = Callable[
    ["Host"], Iterable[Result]
]  # what the host measures once all nodes have connected


def check_nodes(
    meeting: Rendezvous,
    num_nodes: int,
    timeout_s: float,
    tls: TlsFiles | None,
    *,
    folder: str = "",
    measure: Measure = lambda _: (),
) -> Iterator[Result]:
    """Run this node's part of the checks; yield the results, which are the same on all nodes.

    Waits up to `timeout_s` seconds for the nodes to connect, and then up to about 30 s for their
    answers.

    Args:
        folder: the folder in which this node will store the job's files.
        measure: a function that takes further measurements. It is called only on the hosting node,
            and its results are sent to all nodes.
    """
    with contextlib.closing(Listener(token := new_token())) as listener:
        about = m.CheckIn(
            host=socket.gethostname(),
            port=listener.port,
            versions=_versions(),
            token=token,
            folder=folder,
        )
        try:
            if meeting.is_host:
                yield from Host(meeting, about, tls).check(num_nodes, timeout_s, measure)
            else:
                yield from _take_part(meeting, about, tls, timeout_s)
        except LaunchError as err:
            yield Result("nodes", str(err), ok=False)


class Host:
    """The hosting node's side of the checks, which sends requests and combines the answers."""

    def __init__(self, meeting: Rendezvous, about: m.CheckIn, tls: TlsFiles | None) -> None:
        self._events: Mailbox[tuple[str, m.Event]] = Mailbox()
        self._server = ControlServer(meeting.bind_address, meeting.secret, self._events, tls=tls)
        self._self = Member("", about)
        self.members = [self._self]
        self._host = meeting.host

    def check(self, num_nodes: int, timeout_s: float, measure: Measure) -> list[Result]:
        """Run all checks, and send the results to all nodes."""
        try:
            self._wait_for_nodes(num_nodes, timeout_s)
            for node in self.members[1:]:
                self._compare_clocks(node)
            self._try_ways()
            results = [*self._results(num_nodes), *measure(self)]
            for node in self.members[1:]:
                self._send(node, m.Show(text=_as_text(results)))
                self._send(node, m.Over(exit_code=0, ended_by=""))
                self._server.hang_up(node.name)
        finally:
            self._server.close()
            self._events.close()
        return results

    def address_of(self, member: Member) -> str:
        """Return the address at which other nodes reach a member."""
        return member.about.address or self._host

    def probe(
        self, number: int, tasks: Sequence[tuple[Member, Sequence[Task]]], limit_s: float
    ) -> dict[str, m.Probed]:
        """Run probes on several members at once; return their answers, keyed by session name.

        Members that do not answer within `limit_s` seconds are missing from the result.

        Args:
            number: a unique number for the request.
            tasks: pairs of a member and the probes that it must run.
        """
        deadline_s = time.monotonic() + limit_s
        asked = {member.name for member, _ in tasks if member.name}
        for member, own in tasks:
            if member.name:
                packed = [task.pack() for task in own]
                self._send(member, m.Probe(number=number, tasks=packed))
        here = [task for member, own in tasks if not member.name for task in own]
        found = {"": m.Probed(number=number, findings=[one.pack() for one in run_all(here)])}
        while asked - found.keys():
            answer = self._next(
                m.Probed, lambda name, one: name in asked and one.number == number, deadline_s
            )
            if answer is None:
                break
            found[answer[0]] = answer[1]
        return found

    def _send(self, node: Member, command: m.Command) -> None:
        self._server.send(node.name, command)

    def _wait_for_nodes(self, num_nodes: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self.members) < num_nodes:
            came = self._next(m.CheckIn, lambda _name, _event: True, deadline_s)
            if came is None:
                return
            self.members.append(Member(came[0], came[1]))

    def _next(
        self, kind: type[T], fits: Callable[[str, T], bool], deadline_s: float
    ) -> tuple[str, T] | None:
        """Wait for the next event of type `kind` that `fits` accepts; discard all events before it.

        Return None if no such event arrives before the deadline.
        """
        while (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._events.fileno()], [], [], left_s)
            events = self._events.take()
            for index, (name, event) in enumerate(events):
                if isinstance(event, kind) and fits(name, event):
                    for later in events[index + 1 :]:
                        self._events.put(later)
                    return name, event
        return None

    def _compare_clocks(self, node: Member) -> None:
        """Measure a node's clock offset several times; record the result of the fastest exchange.

        The node is assumed to have read its clock at the midpoint of the exchange.
        """
        for number in range(_NUM_TICKS):
            sent_ns = time.time_ns()
            self._send(node, m.Tick(number=number))
            answer = self._next_tock(node, number)
            if answer is None:
                return
            took_s = (time.time_ns() - sent_ns) / 1e9
            if node.ahead_s is None or took_s / 2 < node.error_s:
                node.ahead_s = (answer.wall_ns - sent_ns) / 1e9 - took_s / 2
                node.error_s = took_s / 2

    def _next_tock(self, node: Member, number: int) -> m.Tock | None:
        def fits(name: str, tock: m.Tock) -> bool:
            return name == node.name and tock.number == number

        answer = self._next(m.Tock, fits, time.monotonic() + _TICK_S)
        return None if answer is None else answer[1]

    def _try_ways(self) -> None:
        places = [
            [node.about.host, self.address_of(node), str(node.about.port)] for node in self.members
        ]
        for number, node in enumerate(self.members[1:], start=1):
            self._send(node, m.TryWays(places=[*places[:number], *places[number + 1 :]]))
        self._self.troubles = [f"{host}: {why}" for host, why in _try_all(places[1:]) if why]
        self._self.has_tried = True
        deadline_s = time.monotonic() + _WAYS_S
        by_name = {node.name: node for node in self.members[1:]}
        while not all(node.has_tried for node in self.members):
            answer = self._next(m.WaysTried, lambda name, _event: name in by_name, deadline_s)
            if answer is None:
                return
            node = by_name[answer[0]]
            node.has_tried = True
            node.troubles = [f"{pair[0]}: {pair[1]}" for pair in answer[1].found if all(pair)]

    def _results(self, num_nodes: int) -> Iterator[Result]:
        hosts = ", ".join(node.about.host for node in self.members)
        all_came = len(self.members) >= num_nodes
        yield Result("nodes", f"{len(self.members)} of {num_nodes} connected: {hosts}", all_came)
        yield from compare_versions([node.about for node in self.members])
        for node in self.members[1:]:
            yield self._clock(node)
        troubles = [
            f"{node.about.host} cannot reach {trouble}"
            for node in self.members
            for trouble in (node.troubles if node.has_tried else ["other nodes: it did not answer"])
        ]
        for trouble in troubles:
            yield Result("connectivity", trouble, ok=False)
        if not troubles and len(self.members) > 1:
            yield Result(
                "connectivity", f"each of {len(self.members)} nodes can reach every other node"
            )

    def _clock(self, node: Member) -> Result:
        host = node.about.host
        if node.ahead_s is None:
            return Result("clocks", f"{host} did not answer", ok=False)
        way = "ahead of" if node.ahead_s >= 0 else "behind"
        text = f"{host} is {abs(node.ahead_s) * 1e3:.1f} ms {way} {self._self.about.host}"
        text += f", within {node.error_s * 1e3:.1f} ms"
        if abs(node.ahead_s) > _CLOCK_S:
            text += ": harmless for the job, but log timestamps will not line up"
        return Result("clocks", text, abs(node.ahead_s) <= _CLOCK_S)


def _take_part(
    meeting: Rendezvous, about: m.CheckIn, tls: TlsFiles | None, timeout_s: float
) -> Iterator[Result]:
    """Answer the hosting node's requests until the results arrive; yield the results.

    Raises:
        LaunchError: the hosting node cannot be reached, reports an error, is lost, or does not send
            the results in time.
    """
    link = GrpcLink(meeting.address, meeting.secret, about, timeout_s, tls=tls)
    deadline_s = time.monotonic() + timeout_s * 2 + _WAYS_S * 2
    with contextlib.closing(link):
        while (left_s := deadline_s - time.monotonic()) > 0:
            select.select([link.fileno()], [], [], left_s)
            for command in link.take():
                deadline_s = max(deadline_s, time.monotonic() + _NEXT_S)
                if command is None:
                    raise LaunchError(link.lost_because or "the host closed the connection")
                if isinstance(command, m.Tick):
                    link.send(m.Tock(number=command.number, wall_ns=time.time_ns()))
                elif isinstance(command, m.TryWays):
                    found = [list(pair) for pair in _try_all(command.places)]
                    link.send(m.WaysTried(found=found))
                elif isinstance(command, m.Probe):
                    link.send(_answered(command))
                elif isinstance(command, m.Show):
                    yield from _from_text(command.text)
                elif isinstance(command, m.Over):
                    if command.text:
                        raise LaunchError(command.text)
                    return
    raise LaunchError("the host did not report the results in time")


def _answered(probe: m.Probe) -> m.Probed:
    """Run the requested probes; return a message with their findings.

    Blocks at most until the deadlines of all probes have passed.

    Raises:
        LaunchError: the request is malformed.
    """
    try:
        tasks = [Task.unpack(text) for text in probe.tasks]
    except ValueError as err:
        raise LaunchError(str(err)) from err
    return m.Probed(number=probe.number, findings=[one.pack() for one in run_all(tasks)])


def compare_versions(nodes: Sequence[m.CheckIn]) -> Iterator[Result]:
    """Compare software versions across nodes; yield one result, or one per node if any differ."""
    alike = all(node.versions == nodes[0].versions for node in nodes)
    if alike:
        yield Result("versions", f"{_words(nodes[0])} on all nodes")
        return
    for node in nodes:
        yield Result("versions", f"{node.host} has {_words(node)}", ok=False)


def _words(node: m.CheckIn) -> str:
    return ", ".join(" ".join(pair) for pair in node.versions)


def _versions() -> list[list[str]]:
    try:
        torch = importlib.metadata.version("torch")  # without importing it
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return [["python", platform.python_version()], ["echelon", __version__], ["torch", torch]]


def _try_all(places: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    """Try to connect to each [host, address, port] in `places`; return (host, error) pairs.

    The error is "" on success.
    """
    whole = [place for place in places if len(place) == 3 and place[2].isdecimal()]
    with concurrent.futures.ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        words = pool.map(lambda place: _try(place[1], int(place[2])), whole)
        return [(place[0], said) for place, said in zip(whole, words, strict=True)]


def _try(address: str, port: int) -> str:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as connection:
            said = connection.recv(len(GREETING))
    except OSError as err:
        return f"{address} port {port}: {err.strerror or err}"
    return "" if said == GREETING else f"{address} port {port}: another service is listening there"


def _as_text(results: Sequence[Result]) -> str:
    return "\n".join(f"{int(one.ok)} {one.name} {one.text}" for one in results)


def _from_text(text: str) -> Iterator[Result]:
    for line in text.splitlines():
        ok, _, rest = line.partition(" ")
        name, _, words = rest.partition(" ")
        yield Result(name, words, ok == "1")
