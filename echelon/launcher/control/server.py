"""The coordinator's end of all links: a gRPC server on a thread of its own.

One stream a node, and one a visitor, who only asks. A node that hangs up has left at once; one that
is silent for a while is lost.
Nobody is heard before it has proved, frame by frame, that it knows the job's secret; a peer that
has not within a few seconds is hung up on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from echelon.errors import LaunchError
from echelon.launcher.conf import LOST_AFTER_S
from echelon.launcher.control.client import HEARTBEAT_S, METHOD, OPTIONS
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.messages import (
    Ask,
    CheckIn,
    Command,
    Event,
    Hello,
    Left,
    pack,
    unpack,
)
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import NONCE_BYTES, Seal, new_nonce
from echelon.launcher.tls import TlsFiles

_GREETING_S = 5.0
_CLOSE_S = 3.0
_GRACE_S = 0.5


class ControlServer:
    """Serve at `address` (host:port); events go to `events` as (node, event).

    Args:
        tls: None for plain connections.
        lost_after_s: silence after which a node is lost.

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
    ) -> None:
        _check_free(address)
        self._tls = tls
        self._lost_after_s = lost_after_s
        self._secret = secret
        self._events = events
        self._loop = asyncio.new_event_loop()
        self._sessions: dict[str, asyncio.Queue[Command | None]] = {}
        self._problems: list[Exception] = []
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
            raise LaunchError(f"cannot serve at {address}: {self._problems[0]}")

    def send(self, node: str, command: Command) -> None:
        """Send a command; never blocks. A node that has left gets nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, node, command)

    def hang_up(self, node: str) -> None:
        """End a node's session once what was sent has left."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, node, None)

    def close(self) -> None:
        """End all sessions; waits at most 3 s for what was sent to leave."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_S)

    def _put(self, node: str, command: Command | None) -> None:
        queue = self._sessions.get(node)
        if queue is not None:
            queue.put_nowait(command)

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
            raise OSError("the port is taken, or the address is not this machine's")
        await server.start()
        started.set()
        await self._stop.wait()
        for queue in self._sessions.values():
            queue.put_nowait(None)
        await server.stop(_GRACE_S)

    async def _session(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        try:
            nonce = await asyncio.wait_for(anext(frames), _GREETING_S)
            if len(nonce) != NONCE_BYTES:
                raise LaunchError("unexpected handshake")
            mine = new_nonce()
            seal = Seal(self._secret, nonce, mine, is_host=True)
            await context.write(mine)
            hello = unpack(seal.open(await asyncio.wait_for(anext(frames), _GREETING_S)))
            name = self._name_of(hello)
        except (LaunchError, asyncio.TimeoutError, StopAsyncIteration) as err:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(err) or "no handshake in time")
        else:
            if isinstance(hello, Hello | CheckIn):
                hello = replace(hello, address=_address(context.peer()))
            self._events.put((name, hello))  # type: ignore[arg-type]
            await self._serve_member(name, seal, frames, context)

    def _name_of(self, hello: Event | Command) -> str:
        """Return the name of a new session, by its first message.

        Raises:
            LaunchError: nobody begins with that.
        """
        if isinstance(hello, Hello) and hello.node not in self._sessions:
            name = hello.node
        elif isinstance(hello, Ask | CheckIn):
            name = f"visitor-{secrets.token_hex(8)}"
        else:
            raise LaunchError("unexpected handshake")
        self._sessions[name] = asyncio.Queue()
        return name

    async def _serve_member(
        self,
        name: str,
        seal: Seal,
        frames: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        sender = self._loop.create_task(self._send_all(self._sessions[name], seal, context))
        receiver = self._loop.create_task(self._receive_all(name, seal, frames))
        why = "connection closed"
        try:
            done, _ = await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    why = str(error) or type(error).__name__
        finally:
            sender.cancel()
            receiver.cancel()
            self._sessions.pop(name, None)
            self._events.put((name, Left(reason=why)))

    async def _send_all(
        self,
        queue: asyncio.Queue[Command | None],
        seal: Seal,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        while True:
            try:
                command = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
            except asyncio.TimeoutError:
                await context.write(seal.close(b""))
                continue
            if command is None:
                return
            await context.write(seal.close(pack(command)))

    async def _receive_all(self, node: str, seal: Seal, frames: AsyncIterator[bytes]) -> None:
        while True:
            try:
                frame = await asyncio.wait_for(anext(frames), self._lost_after_s)
            except asyncio.TimeoutError:
                raise LaunchError(f"no heartbeat for {self._lost_after_s:g} s") from None
            except StopAsyncIteration:
                return
            body = seal.open(frame)
            if body:
                self._events.put((node, unpack(body)))  # type: ignore[arg-type]


def _address(peer: str) -> str:
    """Return the numeric address in gRPC's name of a peer, such as `ipv6:%5B::1%5D:40404`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _check_free(address: str) -> None:
    """Find out what gRPC says in many lines: whether an address can be bound.

    Raises:
        LaunchError: it cannot.
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
            hint = "; does another job meet there?" if err.errno == errno.EADDRINUSE else ""
            raise LaunchError(f"cannot serve at {address}: {err.strerror or err}{hint}") from None
