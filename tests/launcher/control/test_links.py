"""Links between nodes and the coordinator over real connections, some of which break."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

import echelon.launcher
from echelon.launcher.control import client, server
from echelon.launcher.control import messages as m
from echelon.launcher.control.client import GrpcLink
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.server import ControlServer
from tests.launcher.cluster import free_port

pytestmark = pytest.mark.ranks

_SECRET = b"a-secret-of-the-tests"
_WAIT_S = 120.0


class _Relay:
    """Forwards TCP connections to a port; `cut` resets all existing ones."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.num_connections = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                other = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [one, other]
                self.num_connections += 1
                for source, target in ((one, other), (other, one)):
                    threading.Thread(target=_copy, args=(source, target), daemon=True).start()

    def cut(self) -> None:
        while self._ends:
            with contextlib.suppress(OSError):
                self._ends.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        self._thread.join(_WAIT_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()


class _Ends:
    """A server and the events that arrive there."""

    def __init__(self, **options: float) -> None:
        self.events: Mailbox[tuple[str, m.Event]] = Mailbox()
        self.server = ControlServer("127.0.0.1:0", _SECRET, self.events, **options)
        self.got: list[m.Event] = []

    def link(self, port: int, *, name: str = "a", join_timeout_s: float = _WAIT_S) -> GrpcLink:
        hello = m.Hello(node=name, host=name, num_workers=1)
        return GrpcLink(f"127.0.0.1:{port}", _SECRET, hello, join_timeout_s)

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not is_true():
            assert time.monotonic() < deadline, self.got
            select.select([self.events.fileno()], [], [], 0.05)
            self.got += [event for _, event in self.events.take()]

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.got)

    def close(self) -> None:
        self.server.close()
        self.events.close()


@pytest.fixture
def ends() -> Iterator[_Ends]:
    made = _Ends()
    yield made
    made.close()


def test_a_connection_that_breaks_again_and_again_loses_nothing_and_repeats_nothing(
    ends, monkeypatch
):
    # However busy the machine is: how soon a node must be back is not what is tested.
    monkeypatch.setattr("echelon.launcher.control.server._RESUME_S", _WAIT_S)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        for number in range(60):
            link.send(m.StopAsked(number=number))
            ends.server.send("a", m.Show(text=str(number)))
            if number % 20 == 10:
                connections = relay.num_connections
                relay.cut()
                ends.wait_for(lambda: relay.num_connections > connections)  # noqa: B023
        ends.wait_for(lambda: ends.count(m.StopAsked) >= 60)
        shown = []
        deadline = time.monotonic() + _WAIT_S
        while len(shown) < 60 and time.monotonic() < deadline:
            select.select([link.fileno()], [], [], 0.05)
            shown += [command.text for command in link.take()]
        assert shown == [str(number) for number in range(60)]
        assert [e.number for e in ends.got if isinstance(e, m.StopAsked)] == list(range(60))
        assert (ends.count(m.Hello), ends.count(m.Left)) == (1, 0), "one session all along"
    finally:
        link.close()
        relay.close()


def test_a_node_whose_greeting_was_cut_off_greets_again(ends):
    relay = _Relay(ends.server.port)
    link = None
    try:
        blocked = threading.Event()
        taking = threading.Event()

        def hold() -> None:
            taking.set()
            blocked.wait(_WAIT_S)

        ends.server._loop.call_soon_threadsafe(hold)  # a host that others keep busy
        assert taking.wait(_WAIT_S)
        link = ends.link(relay.port)
        deadline = time.monotonic() + _WAIT_S
        while relay.num_connections == 0:
            assert time.monotonic() < deadline
            select.select([], [], [], 0.01)
        select.select([], [], [], 0.2)
        relay.cut()
        blocked.set()
        ends.wait_for(lambda: ends.count(m.Hello) >= 1)
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert link.lost_because == ""
    finally:
        blocked.set()
        if link is not None:
            link.close()
        relay.close()


def test_a_stream_that_ends_between_two_frames_of_the_greeting_is_dialled_again(ends, monkeypatch):
    relay = _Relay(ends.server.port)
    read = GrpcLink._read

    async def read_and_lose(self: GrpcLink, call: grpc.aio.StreamStreamCall) -> bytes:
        frame = await read(self, call)
        if relay.num_connections == 1:
            relay.cut()
            await call.code()  # gRPC has noticed: what is written now, it refuses
        return frame

    monkeypatch.setattr(GrpcLink, "_read", read_and_lose)
    link = ends.link(relay.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert link.lost_because == ""
    finally:
        link.close()
        relay.close()


def test_a_node_whose_welcome_was_lost_greets_again_and_is_not_said_to_have_left(ends, monkeypatch):
    num_welcomes = 0

    class _Losing(server.Seal):
        def close(self, frame: bytes) -> bytes:
            nonlocal num_welcomes
            num_welcomes += 1
            if num_welcomes == 1:
                raise OSError("reset by peer")
            return super().close(frame)

    monkeypatch.setattr(server, "Seal", _Losing)
    link = ends.link(ends.server.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert (link.lost_because, ends.count(m.Left)) == ("", 0)
    finally:
        link.close()


def test_a_node_that_greets_again_because_its_welcome_got_lost_on_the_way_is_the_same_node(
    ends, monkeypatch
):
    monkeypatch.setattr(server, "_RESUME_S", 2 * _WAIT_S)
    relay = _Relay(ends.server.port)
    greet = GrpcLink._greet

    async def greet_and_lose(self: GrpcLink, call: grpc.aio.StreamStreamCall) -> server.Seal:
        seal = await greet(self, call)
        if relay.num_connections == 1:
            self._token, self.is_connected = "", False
            relay.cut()
            raise OSError("connection closed")
        return seal

    monkeypatch.setattr(GrpcLink, "_greet", greet_and_lose)
    link = ends.link(relay.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        ends.server.send("a", m.Show(text="once"))
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert (ends.count(m.Hello), ends.count(m.Left)) == (1, 0)
        shown: list[str] = []
        deadline = time.monotonic() + _WAIT_S
        while not shown and time.monotonic() < deadline:
            select.select([link.fileno()], [], [], 0.05)
            shown += [command.text for command in link.take()]
        assert shown == ["once"]
    finally:
        link.close()
        relay.close()


def test_a_node_whose_second_welcome_was_lost_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(server, "_RESUME_S", 0.02)
    ends = _Ends(lost_after_s=0.5, beat_s=0.1)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)

        class _Losing(server.Seal):
            def close(self, frame: bytes) -> bytes:
                raise OSError("reset by peer")

        monkeypatch.setattr(server, "Seal", _Losing)
        relay.cut()
        ends.wait_for(lambda: ends.count(m.Left) == 1)
    finally:
        link.close()
        relay.close()
        ends.close()


def test_a_stream_that_ends_without_a_goodbye_has_broken_and_goes_on(ends, monkeypatch):
    monkeypatch.setattr(server, "_RESUME_S", _WAIT_S)
    receive = ControlServer._receive_all
    num_ended = 0

    async def receive_and_end(self: ControlServer, member, seal, frames) -> None:
        nonlocal num_ended
        if num_ended == 0:
            num_ended = 1

            async def nothing() -> AsyncIterator[bytes]:
                return
                yield b""

            frames = nothing()  # what gRPC makes of a reset, when it notices that first
        await receive(self, member, seal, frames)

    monkeypatch.setattr(ControlServer, "_receive_all", receive_and_end)
    link = ends.link(ends.server.port)
    try:
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert (ends.count(m.Hello), ends.count(m.Left), num_ended) == (1, 0, 1)
    finally:
        link.close()
    ends.wait_for(lambda: ends.count(m.Left) == 1)  # at once, for it said goodbye


def _hold(link: GrpcLink, release: threading.Event) -> None:
    """Stop a link's thread until `release` is set, like a starved or stopped process."""
    held = threading.Event()

    def hold() -> None:
        held.set()
        release.wait(_WAIT_S)

    link._loop.call_soon_threadsafe(hold)
    assert held.wait(_WAIT_S)


def test_a_node_whose_connection_broke_may_be_starved_for_longer_than_a_dead_one_is_awaited(
    ends, monkeypatch
):
    looks = 0
    asked = server.is_gone

    async def ask(address: str, port: int) -> bool:
        nonlocal looks
        gone = await asked(address, port)
        looks += 1
        return gone

    monkeypatch.setattr(server, "_RESUME_S", 0.02)
    monkeypatch.setattr(server, "is_gone", ask)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    release = threading.Event()
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        _hold(link, release)
        relay.cut()
        ends.wait_for(lambda: looks >= 3)
        release.set()
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert (ends.count(m.Hello), ends.count(m.Left)) == (1, 0)
    finally:
        release.set()
        link.close()
        relay.close()


def test_a_node_whose_launcher_is_gone_is_lost_long_before_silence_counts(monkeypatch):
    monkeypatch.setattr(server, "_RESUME_S", 1000.0)  # the first checks follow at once
    ends = _Ends(lost_after_s=1000.0)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    release = threading.Event()
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        _hold(link, release)
        link._life.close()  # as its end does
        relay.cut()
        ends.wait_for(lambda: ends.count(m.Left) == 1)
        (left,) = (event for event in ends.got if isinstance(event, m.Left))
        assert left.reason == "the connection was closed"
    finally:
        release.set()
        link.close()
        relay.close()
        ends.close()


def test_a_node_that_does_not_come_back_is_lost_once_its_silence_counts(monkeypatch):
    monkeypatch.setattr(server, "_RESUME_S", 0.02)
    ends = _Ends(lost_after_s=0.5, beat_s=0.1)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    release = threading.Event()
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        _hold(link, release)
        relay.cut()
        ends.wait_for(lambda: ends.count(m.Left) == 1)
    finally:
        release.set()
        link.close()
        relay.close()
        ends.close()


def test_a_host_that_stood_still_does_not_take_that_for_its_nodes_silence():
    """Both stand still where their machines are suspended together, and the host wakes first."""
    ends = _Ends(beat_s=0.1)
    link = ends.link(ends.server.port)
    stood, release = threading.Event(), threading.Event()

    def stand_still() -> None:
        time.sleep(1.5)  # the thread that counts silence is the one that stands still
        stood.set()

    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        ends.server._lost_after_s = 1.0  # the node has been told more
        _hold(link, release)
        ends.server._loop.call_soon_threadsafe(stand_still)
        assert stood.wait(_WAIT_S)
        ended = threading.Event()
        ends.server._loop.call_soon_threadsafe(ends.server._loop.call_later, 0.2, ended.set)
        assert ended.wait(_WAIT_S)  # it has counted
        release.set()
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1)
        assert (ends.count(m.Hello), ends.count(m.Left), link.lost_because) == (1, 0, "")
    finally:
        release.set()
        link.close()
        ends.close()


def test_a_node_that_stood_still_does_not_take_that_for_its_hosts_silence(monkeypatch):
    monkeypatch.setattr(server, "_RESUME_S", _WAIT_S)  # the host waits in any case
    ends = _Ends(lost_after_s=2.0, beat_s=0.1)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    dial = GrpcLink._dial

    async def stand_still_and_dial(self: GrpcLink, channel: grpc.aio.Channel) -> None:
        time.sleep(2.5)
        await dial(self, channel)

    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        monkeypatch.setattr(GrpcLink, "_dial", stand_still_and_dial)
        relay.cut()
        link.send(m.StopAsked(number=1))
        ends.wait_for(lambda: ends.count(m.StopAsked) == 1 or link.lost_because != "")
        assert (ends.count(m.Hello), ends.count(m.Left), link.lost_because) == (1, 0, "")
    finally:
        link.close()
        relay.close()
        ends.close()


def test_a_silent_node_is_lost():
    ends = _Ends(lost_after_s=1.0)
    link = ends.link(ends.server.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        release = threading.Event()
        _hold(link, release)
        ends.wait_for(lambda: ends.count(m.Left) == 1)
        release.set()
        (left,) = (event for event in ends.got if isinstance(event, m.Left))
        assert left.reason == "no heartbeat for 1 s"
    finally:
        link.close()
        ends.close()


async def _blocks(*_: object) -> None:
    await asyncio.Event().wait()


def test_a_greeting_over_a_dead_connection_does_not_outlast_the_silence(monkeypatch):
    """gRPC may count such a connection as ready, so that dialling does not notice."""
    ends = _Ends(lost_after_s=0.5, beat_s=0.1)
    relay = _Relay(ends.server.port)
    link = ends.link(relay.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        ends.wait_for(lambda: link.is_connected)
        monkeypatch.setattr(client, "_write", _blocks)
        relay.cut()
        commands: list = []
        deadline = time.monotonic() + _WAIT_S
        while None not in commands and time.monotonic() < deadline:
            select.select([link.fileno()], [], [], 0.05)
            commands += link.take()
        assert link.lost_because == "no heartbeat for 0.5 s"
    finally:
        link.close()
        relay.close()
        ends.close()


def test_the_last_word_reaches_a_node_that_is_slow_to_read(ends):
    link = ends.link(ends.server.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        release = threading.Event()
        _hold(link, release)
        for _ in range(6):  # more than may be on its way
            ends.server.send("a", m.Show(text="x" * (1 << 20)))
        ends.server.send("a", m.Over(exit_code=7, ended_by="worker"))
        ends.server.hang_up("a")
        threading.Timer(0.7, release.set).start()
        ends.server.close()
        commands: list = []
        deadline = time.monotonic() + _WAIT_S
        while None not in commands and time.monotonic() < deadline:
            select.select([link.fileno()], [], [], 0.05)
            commands += link.take()
        assert isinstance(commands[-2], m.Over), (len(commands), link.lost_because, link.last_error)
    finally:
        release.set()
        link.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_refusal_is_final_and_a_busy_host_is_not(ends, at_once):
    """gRPC reports the same status from a read or a write, whichever meets it."""
    link = ends.link(ends.server.port)
    try:
        kind = grpc.StatusCode.UNAUTHENTICATED if at_once else grpc.StatusCode.UNAVAILABLE
        none = grpc.aio.Metadata()
        error = grpc.aio.AioRpcError(kind, none, none)
        assert link._may_dial_again(error) is not at_once
    finally:
        link.close()


def test_a_node_that_greets_a_host_just_before_it_serves_is_admitted_once_it_does(monkeypatch):
    """An elected node answers polls as the host a moment before it admits nodes."""
    greeted = threading.Event()
    member_of = ControlServer._member_of

    def note(self: ControlServer, hello: m.Event | m.Command) -> object:
        greeted.set()
        return member_of(self, hello)

    monkeypatch.setattr(ControlServer, "_member_of", note)
    ends = _Ends(is_open=False)
    link = ends.link(ends.server.port)
    try:
        assert greeted.wait(_WAIT_S)
        select.select([link.fileno()], [], [], 0.1)
        ends.server.open(is_open=True)
        ends.wait_for(lambda: ends.count(m.Hello) == 1 or link.lost_because != "")
        assert (ends.count(m.Hello), link.lost_because) == (1, "")
    finally:
        link.close()
        ends.close()


def test_a_greeting_is_not_awaited_for_long_beyond_the_time_to_join(ends):
    link = ends.link(ends.server.port, join_timeout_s=1.0)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        link.is_connected = False  # as before the first greeting
        assert link._greeting_s <= 5.0
        link._deadline_s += 600.0
        assert 5.0 < link._greeting_s <= 30.0
    finally:
        link.close()


def test_dialling_in_vain_ends_with_the_last_reason():
    hello = m.Hello(node="a", host="a", num_workers=1)
    link = GrpcLink(f"127.0.0.1:{free_port()}", _SECRET, hello, 1.0)
    try:
        ready, _, _ = select.select([link.fileno()], [], [], _WAIT_S)
        assert ready
        assert link.take() == [None]
        assert "in time (last error: connection refused)" in link.lost_because
    finally:
        link.close()


def test_an_end_of_waiting_is_caught_by_its_name_before_python_311():
    """There `asyncio.TimeoutError` is not yet the built-in one."""
    for path in (Path(echelon.launcher.__file__).parent / "control").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                caught = ast.unparse(node.type)
                plain = "TimeoutError" in caught.replace("asyncio.TimeoutError", "")
                assert not plain or "asyncio.TimeoutError" in caught, f"{path}:{node.lineno}"


def test_one_task_polls_for_a_coordinator_that_is_behind_however_many_nodes_wait(ends, monkeypatch):
    polls: Counter[object] = Counter()

    def num_waiting(mailbox: Mailbox[object]) -> int:
        with contextlib.suppress(RuntimeError):  # not the server's thread
            polls[asyncio.current_task()] += 1
        return len(mailbox._items)

    links = [ends.link(ends.server.port, name=f"node-{place}") for place in range(8)]
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == len(links))
        for _ in range(server._MAX_WAITING + 1):
            ends.events.put(("someone", m.Left(reason="")))
        for link in links:
            link.send(m.WorkerEnded(attempt=0, rank=0, code=0))
            link.send(m.WorkerEnded(attempt=0, rank=1, code=0))
        monkeypatch.setattr(Mailbox, "num_waiting", property(num_waiting))
        deadline = time.monotonic() + _WAIT_S
        while max(polls.values(), default=0) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        often = [task for task, times in polls.items() if times > 5]
        assert len(often) == 1, polls
        ends.wait_for(lambda: ends.count(m.WorkerEnded) == 2 * len(links))
    finally:
        for link in links:
            link.close()


def test_a_coordinator_that_is_behind_is_sent_no_more_than_it_can_hold_and_loses_nothing(ends):
    link = ends.link(ends.server.port)
    try:
        ends.wait_for(lambda: ends.count(m.Hello) == 1)
        for rank in range(3 * server._MAX_WAITING):
            link.send(m.WorkerEnded(attempt=0, rank=rank, code=0))
        deadline = time.monotonic() + _WAIT_S
        while ends.events.num_waiting <= server._MAX_WAITING:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        select.select([], [], [], 0.2)  # more would have arrived by now
        assert ends.events.num_waiting == server._MAX_WAITING + 1
        ends.wait_for(lambda: ends.count(m.WorkerEnded) == 3 * server._MAX_WAITING)
        ranks = [event.rank for event in ends.got if isinstance(event, m.WorkerEnded)]
        assert ranks == list(range(3 * server._MAX_WAITING))
    finally:
        link.close()
