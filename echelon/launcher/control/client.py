"""A node's link to a coordinator elsewhere: one gRPC stream, served by one thread.

The thread dials until the deadline, greets, and then passes frames both ways; every half second
it sends an empty frame, and it takes silence for loss: a link that is cut without a word is noticed
as one that is closed, a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from echelon.errors import LaunchError
from echelon.launcher.conf import LOST_AFTER_S
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.messages import MAX_MESSAGE_BYTES, Command, Event, pack, unpack
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import Seal, new_nonce
from echelon.launcher.tls import TlsFiles

METHOD = "/echelon.Control/Session"
HEARTBEAT_S = 0.5
_GREETING_S = 10.0
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_DIAL_S = 0.25
_CLOSE_S = 3.0


class GrpcLink:
    """Dial `endpoint` (host:port) in the background until `join_timeout_s` has passed.

    Args:
        tls: None for plain connections.
        lost_after_s: silence that counts as a loss.
    """

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        hello: Event,
        join_timeout_s: float,
        *,
        tls: TlsFiles | None = None,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self.lost_because = ""
        self.is_connected = False
        self._tls = tls
        self._lost_after_s = lost_after_s
        self._endpoint = endpoint
        self._secret = secret
        self._hello = hello
        self._deadline_s = time.monotonic() + join_timeout_s
        self._incoming: Mailbox[Command | None] = Mailbox()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[Event | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._serve, name="echelon-link", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Send an event; never blocks."""
        with contextlib.suppress(RuntimeError):  # the link has ended: its `None` says so
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, event)

    def fileno(self) -> int:
        """Readable when commands may have come."""
        return self._incoming.fileno()

    def take(self) -> list[Command | None]:
        """Return the commands that have come; None, last: the coordinator is gone."""
        return self._incoming.take()

    def close(self) -> None:
        """Hang up; waits at most 3 s for what was sent to leave."""
        with contextlib.suppress(RuntimeError):
            if self.is_connected:
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, None)
            else:
                self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_CLOSE_S)
        self._incoming.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _serve(self) -> None:
        try:
            self._task = self._loop.create_task(self._session())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self.lost_because = "closed before the coordinator was reached"
        except (grpc.RpcError, LaunchError, OSError, TimeoutError, asyncio.TimeoutError) as err:
            self.lost_because = self.lost_because or _describe(err)
        finally:
            self._incoming.put(None)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _session(self) -> None:
        async with _channel(self._endpoint, self._tls) as channel:
            await self._dial(channel)
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
            nonce = new_nonce()
            await call.write(nonce)
            greeting = await asyncio.wait_for(call.read(), _GREETING_S)
            if not isinstance(greeting, bytes):
                raise LaunchError("the coordinator hung up before a greeting")
            seal = Seal(self._secret, nonce, greeting, is_host=False)
            await call.write(seal.close(pack(self._hello)))
            self.is_connected = True
            sender = self._loop.create_task(self._send_all(call, seal))
            try:
                await self._receive_all(call, seal, sender)
            finally:
                sender.cancel()
                call.cancel()
                await asyncio.wait({sender})

    @property
    def _perhaps(self) -> str:
        return ", or TLS fails: see --rdzv-cert and --rdzv-ca on both sides" if self._tls else ""

    async def _dial(self, channel: grpc.aio.Channel) -> None:
        state = channel.get_state(try_to_connect=True)
        while state != grpc.ChannelConnectivity.READY:
            if time.monotonic() > self._deadline_s:
                raise LaunchError(
                    f"could not reach the coordinator at {self._endpoint}{self._perhaps}"
                )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(channel.wait_for_state_change(state), _DIAL_S)
            state = channel.get_state(try_to_connect=True)

    async def _send_all(self, call: grpc.aio.StreamStreamCall[bytes, bytes], seal: Seal) -> None:
        while True:
            try:
                event = await asyncio.wait_for(self._outgoing.get(), HEARTBEAT_S)
            except asyncio.TimeoutError:
                await call.write(seal.close(b""))
                continue
            if event is None:
                await call.done_writing()
                return
            await call.write(seal.close(pack(event)))

    async def _receive_all(
        self, call: grpc.aio.StreamStreamCall[bytes, bytes], seal: Seal, sender: asyncio.Task[None]
    ) -> None:
        while True:
            try:
                frame = await asyncio.wait_for(call.read(), self._lost_after_s)
            except asyncio.TimeoutError:
                raise LaunchError(f"no heartbeat for {self._lost_after_s:g} s") from None
            if not isinstance(frame, bytes):
                return  # end of the stream: hung up on either side
            body = seal.open(frame)
            if body:
                self._incoming.put(unpack(body))  # type: ignore[arg-type]
            if sender.done() and sender.exception() is not None:
                raise LaunchError(f"cannot send: {sender.exception()}")


def _channel(endpoint: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=OPTIONS)
    return grpc.aio.secure_channel(endpoint, tls.for_client(), options=OPTIONS)


def _describe(error: BaseException) -> str:
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error) or type(error).__name__
