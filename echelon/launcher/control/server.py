"""Connect the coordinator to all nodes and status clients through a gRPC server.

The server runs on its own thread. Each node and each status client has one stream. If a node's
stream breaks, the node can reconnect and resume its session. A node counts as lost once its machine
refuses connections to the node's `LifeSign`, or once the node has been silent for too long. Silence
is measured on a clock that stops while the server's process is not running.

Every frame is authenticated with the job's secret. If messages arrive faster than the coordinator
can handle them, the server stops reading from the nodes until the coordinator has caught up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from echelon.errors import LaunchError
from echelon.launcher.control.client import METHOD, OPTIONS
from echelon.launcher.control.conf import BEAT_S, LOST_AFTER_S
from echelon.launcher.control.lifesign import is_gone
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.lived import LivedTime
from echelon.launcher.control.messages import (
    Ask,
    CheckIn,
    Command,
    Event,
    Hello,
    Left,
    Resume,
    Welcome,
    pack,
    unpack,
)
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import NONCE_BYTES, Seal, new_nonce
from echelon.launcher.control.session import Session
from echelon.launcher.control.tls import TlsFiles

_GREETING_S = 15.0  # includes this side's own delay when thousands of nodes connect at once
_CLOSE_S = 10.0
_DRAIN_S = 5.0  # for the last messages to many nodes
_GRACE_S = 0.5
_FIRST_LOOK_S = 0.1  # after a stream broke, until the first check for the launcher
_RESUME_S = 1.5  # at most, between two of these checks whether the launcher of a node is gone
_MAX_WAITING = 256  # messages; one that carries a dump has up to 1 MiB
_BEHIND_S = 0.01
_LOOK_S = 1.0  # the longest delay in detecting a loss if beats are rarer


class ControlServer:
    """A server at `address` (host:port) that puts each received event into `events`.

    Args:
        events: the mailbox for received events, as (node, event) pairs.
        tls: the certificates; None for unencrypted connections.
        lost_after_s: how long a node may be silent before it counts as lost, in seconds.
        answer: returns the reply to a `Poll` or `Renew`, or None for any other message. Called on
            the server's thread.
        is_open: whether this node hosts the job. If not, the server only answers polls.
        beat_s: the longest interval between two messages from either side, in seconds.

    Raises:
        LaunchError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        events: Mailbox[tuple[str, Event]],
        *,
        tls: TlsFiles | None = None,
        lost_after_s: float = LOST_AFTER_S,
        answer: Callable[[Event | Command], Event | Command | None] | None = None,
        is_open: bool = True,
        beat_s: float = BEAT_S,
    ) -> None:
        _check_free(address)
        self._answer = answer
        self._is_open = is_open
        self._tls = tls
        self._lost_after_s = lost_after_s
        self._beat_s = beat_s
        self._secret = secret
        self._events = events
        self._loop = asyncio.new_event_loop()
        self._look_s = min(beat_s, _LOOK_S)
        self._lived = LivedTime(self._look_s, self._loop.time())
        self._members: dict[str, _Member] = {}
        self._problems: list[Exception] = []
        self._has_room: asyncio.Task[None] | None = None  # ends once nodes may send again
        self._stop = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(address, started), name="echelon-control", daemon=True
        )
        self.port = 0
        self._thread.start()
        started.wait()
        if self._problems:
            self._thread.join()
            raise LaunchError(f"cannot listen on {address}: {self._problems[0]}")

    def send(self, node: str, command: Command) -> None:
        """Send a command to a node. Does not block; drops the command if the node has left."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, node, command)

    def hang_up(self, node: str) -> None:
        """End a node's session once all pending messages have been delivered."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, node, None)

    def open(self, *, is_open: bool) -> None:
        """Start or stop admitting nodes.

        Args:
            is_open: whether to admit nodes. If False, all sessions end, and the server only answers
                polls.
        """
        self._is_open = is_open
        if not is_open:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        for member in self._members.values():
            member.is_ending = True
            member.wake.set()

    def close(self) -> None:
        """End all sessions, after waiting up to 10 s for pending messages to be delivered."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_S)

    def _put(self, node: str, command: Command | None) -> None:
        member = self._members.get(node)
        if member is None:
            return
        if command is None:
            member.is_ending = True
        else:
            member.state.put(pack(command))
        member.wake.set()

    def _serve(self, address: str, started: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._run(address, started))
        except (RuntimeError, OSError) as err:
            self._problems.append(err)
        finally:
            started.set()
            self._loop.close()

    async def _run(self, address: str, started: threading.Event) -> None:
        server = grpc.aio.server(options=OPTIONS)
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session
        )
        service, _, method = METHOD.strip("/").partition("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        if self._tls is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self._tls.for_server())
        if self.port == 0:
            raise OSError("the port is taken, or the address does not belong to this machine")
        await server.start()
        started.set()
        ticker = self._loop.create_task(self._tick())
        await self._stop.wait()
        ticker.cancel()
        self._end_all()
        deadline_s = self._loop.time() + _DRAIN_S
        while self._members and self._loop.time() < deadline_s:
            await asyncio.sleep(0.02)
        for member in self._members.values():
            member.take_over()
        await server.stop(_GRACE_S)

    async def _tick(self) -> None:
        """Send heartbeats to all nodes when due, and drop nodes that have been silent too long."""
        while True:
            await asyncio.sleep(self._look_s)
            now_s = self._loop.time()
            self._lived.tick(now_s)
            for member in self._members.values():
                if self._is_silent(member):
                    member.fall_silent()
                elif now_s - member.sent_s >= self._beat_s - self._look_s / 2:
                    member.owes_beat = True
                    member.wake.set()

    async def _room(self) -> None:
        """Wait until the coordinator has caught up with the received messages.

        One task polls the mailbox on behalf of all waiting nodes.
        """
        if self._has_room is None:
            self._has_room = self._loop.create_task(self._poll_for_room())
        await asyncio.shield(self._has_room)

    async def _poll_for_room(self) -> None:
        while self._events.num_waiting > _MAX_WAITING:
            await asyncio.sleep(_BEHIND_S)
        self._has_room = None

    def _now_lived_s(self) -> float:
        return self._lived.at(self._loop.time())

    def _is_silent(self, member: _Member) -> bool:
        """Return whether a node has been silent for so long that it counts as lost."""
        return self._now_lived_s() - member.heard_s > self._lost_after_s

    async def _session(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            nonce = await asyncio.wait_for(anext(frames), _GREETING_S)
            if len(nonce) != NONCE_BYTES:
                raise LaunchError("the peer sent an unexpected handshake")
            mine = new_nonce()
            seal = Seal(self._secret, nonce, mine, is_host=True)
            await context.write(mine)
            hello = unpack(seal.open(await asyncio.wait_for(anext(frames), _GREETING_S)))
            answer = None if self._answer is None else self._answer(hello)
            if answer is not None:
                await context.write(seal.close(pack(answer)))
                return
            member = self._member_of(hello)
        except (_TryAgainError, asyncio.TimeoutError, StopAsyncIteration) as err:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(err) or "no handshake in time")
        except LaunchError as err:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(err))
        else:
            await self._serve_member(member, hello, seal, frames, context)

    async def _welcome(
        self,
        member: _Member,
        hello: Event | Command,
        seal: Seal,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        welcome = Welcome(
            token=member.token,
            received=member.state.received,
            lost_after_ms=int(self._lost_after_s * 1000),
            beat_ms=int(self._beat_s * 1000),
        )
        await context.write(seal.close(pack(welcome)))
        member.state.resume(hello.received if isinstance(hello, Resume) else 0)
        if (greeting := member.greeting) is not None:
            member.greeting = None
            if isinstance(greeting, Hello | CheckIn):
                greeting = replace(greeting, address=_address(context.peer()))
            self._events.put((member.name, greeting))

    def _member_of(self, hello: Event | Command) -> _Member:
        """Return the member to which a stream belongs, as identified by the stream's first message.

        Raises:
            _TryAgainError: the peer's previous session has not ended yet, or this node is not the
                job's host but might become the host.
            LaunchError: the message can neither start nor resume a session.
        """
        if not self._is_open:
            why = "this node does not host the job"
            raise _TryAgainError(why) if isinstance(hello, Hello) else LaunchError(why)
        if isinstance(hello, Resume):
            member = self._members.get(hello.node)
            if member is None or not hmac.compare_digest(member.token, hello.token):
                raise LaunchError("this node has been declared lost")
            member.take_over()
            return member
        if isinstance(hello, Hello):
            if (known := self._members.get(hello.node)) is not None:
                if known.has_spoken:
                    raise _TryAgainError("this node's previous connection is still open")
                known.take_over()  # its welcome was lost
                known.token = secrets.token_hex(16)  # another node of that name cannot resume
                known.life_port = hello.life_port
                return known
            member = _Member(hello.node, hello, self._now_lived_s(), can_resume=True)
            member.life_port = hello.life_port
        elif isinstance(hello, Ask | CheckIn):
            name = f"visitor-{secrets.token_hex(8)}"
            member = _Member(name, hello, self._now_lived_s(), can_resume=False)
        else:
            raise LaunchError("the peer sent an unexpected handshake")
        self._members[member.name] = member
        return member

    async def _serve_member(
        self,
        member: _Member,
        hello: Event | Command,
        seal: Seal,
        frames: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        stream = member.stream
        why, is_broken = "the connection was closed", True
        tasks: tuple[asyncio.Task[None], ...] = ()
        try:
            await self._welcome(member, hello, seal, context)
            if stream != member.stream:
                return
            sender = self._loop.create_task(self._send_all(member, seal, context))
            receiver = self._loop.create_task(self._receive_all(member, seal, frames))
            member.tasks = tasks = (sender, receiver)
            member.address = _address(context.peer())
            member.heard_s = self._now_lived_s()
            member.is_silent = False
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_broken = all(_is_broken(task) for task in done)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    why = str(error) or type(error).__name__
        finally:
            for task in tasks:
                task.cancel()
            if stream == member.stream:  # no later one has taken over
                if is_broken and member.can_resume and not member.is_ending:
                    member.awaiting = self._loop.create_task(self._await_return(member))
                else:
                    self._lose(member, why)

    async def _await_return(self, member: _Member) -> None:
        """Wait for a disconnected node to reconnect; drop it once it counts as lost."""
        pause_s = _FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            if await is_gone(member.address, member.life_port) or self._is_silent(member):
                break
            pause_s = min(2 * pause_s, _RESUME_S)
        self._lose(member, "the connection was closed")

    def _lose(self, member: _Member, why: str) -> None:
        if self._members.pop(member.name, None) is not None and member.greeting is None:
            self._events.put((member.name, Left(reason=why)))

    async def _send_all(
        self, member: _Member, seal: Seal, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        state = member.state
        while True:
            member.wake.clear()
            while (frame := state.frame()) is not None:
                await context.write(seal.close(frame))
                member.note_sent(self._loop.time())
            if member.is_ending and state.is_delivered:
                return  # undelivered messages would be lost with the connection
            if state.owes_acknowledgement or member.owes_beat:
                await context.write(seal.close(state.beat()))
                member.note_sent(self._loop.time())
            await member.wake.wait()

    async def _receive_all(self, member: _Member, seal: Seal, frames: AsyncIterator[bytes]) -> None:
        state = member.state
        while True:
            while self._events.num_waiting > _MAX_WAITING:  # the coordinator is behind
                await self._room()
                member.heard_s = self._now_lived_s()  # unread input does not count as silence
            try:
                frame = await anext(frames)
            except StopAsyncIteration:  # gRPC reports a reset connection in the same way
                raise OSError("the connection was closed") from None
            except asyncio.CancelledError:
                if member.is_silent:
                    raise LaunchError(f"no heartbeat for {self._lost_after_s:g} s") from None
                raise
            member.heard_s = self._now_lived_s()
            member.has_spoken = True
            message = state.take(seal.open(frame))
            if message is not None:
                self._events.put((member.name, unpack(message)))  # type: ignore[arg-type]
            if state.has_hung_up:
                return
            # There may be room again, or the last message may have been acknowledged.
            if member.is_ending or not state.is_idle or state.owes_acknowledgement:
                member.wake.set()


class _TryAgainError(LaunchError):
    """An error: the server cannot accept a greeting yet, and the peer should try again."""


class _Member:
    """The state of a node or of a status client, preserved across reconnections."""

    def __init__(self, name: str, greeting: Event, heard_s: float, *, can_resume: bool) -> None:
        self.name = name
        self.can_resume = can_resume
        self.has_spoken = False  # since it was welcomed
        self.greeting: Event | None = greeting  # until it has been passed to the coordinator
        self.token = secrets.token_hex(16)
        self.state = Session()
        self.wake = asyncio.Event()
        self.is_ending = False
        self.stream = 0  # counts connections
        self.tasks: tuple[asyncio.Task[None], ...] = ()  # sender, receiver
        self.address = ""  # of its latest connection
        self.life_port = 0
        self.awaiting: asyncio.Task[None] | None = None  # runs until the node reconnects
        self.owes_beat = False
        self.heard_s = heard_s  # by the clock that stops with this process
        self.sent_s = asyncio.get_running_loop().time()
        self.is_silent = False

    def note_sent(self, now_s: float) -> None:
        """Record that a frame was sent; every frame also serves as a heartbeat."""
        self.owes_beat = False
        self.sent_s = now_s

    def fall_silent(self) -> None:
        """End the connection, because the node has been silent for too long."""
        if self.tasks and not self.is_silent:
            self.is_silent = True
            self.tasks[1].cancel()

    def take_over(self) -> None:
        """End the previous connection, because a new one replaces it."""
        self.stream += 1
        if self.awaiting is not None:
            self.awaiting.cancel()
        for task in self.tasks:
            task.cancel()


def _is_broken(task: asyncio.Task[None]) -> bool:
    """Return whether a stream ended because its connection broke."""
    if task.cancelled():
        return True
    error = task.exception()
    return error is not None and not isinstance(error, LaunchError)


def _address(peer: str) -> str:
    """Return the numeric address in a gRPC peer name such as `ipv6:%5B::1%5D:40404`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _check_free(address: str) -> None:
    """Check that an address can be bound.

    Raises:
        LaunchError: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen()
        except OSError as err:
            hint = "; is another job using this port?" if err.errno == errno.EADDRINUSE else ""
            raise LaunchError(f"cannot listen on {address}: {err.strerror or err}{hint}") from None
