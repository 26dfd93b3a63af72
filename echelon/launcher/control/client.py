"""Connect a node to a coordinator on another node over gRPC.

The link runs on its own thread. The thread tries to connect until the join timeout expires, sends a
greeting, and then transfers frames in both directions. Empty frames serve as heartbeats. If the
stream ends or is silent for too long, the thread reconnects and resumes the session. The
coordinator counts as lost once its host refuses a connection, or once nothing has arrived for
`lost_after_s`.

Silence is measured on a clock that stops while this process is not running.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

from echelon.errors import LaunchError
from echelon.launcher.control.conf import BEAT_S, LOST_AFTER_S
from echelon.launcher.control.lifesign import LifeSign
from echelon.launcher.control.link import Mailbox
from echelon.launcher.control.lived import LivedTime
from echelon.launcher.control.messages import (
    MAX_MESSAGE_BYTES,
    Command,
    Event,
    Hello,
    Over,
    Resume,
    Welcome,
    pack,
    unpack,
)
from echelon.launcher.control.quiet import grpc
from echelon.launcher.control.seal import Seal, new_nonce
from echelon.launcher.control.session import Session
from echelon.launcher.control.tls import TlsFiles

METHOD = "/echelon.Control/Session"
_GREETING_S = 30.0  # thousands of nodes may send greetings at once and have to queue
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_LEAST_GREETING_S = 5.0
_DIAL_S = 0.25
_TICK_S = 0.25
_CLOSE_S = 3.0
_PROBE_S = 2.0
_TRIES = 3  # connections tried within the time that counts as a loss
_LEAST_SILENCE_S = 2.0  # a busy machine may delay four heartbeats
_REFUSED = "connection refused"
_retired: list[asyncio.AbstractEventLoop] = []


class GrpcLink:
    """A link to the coordinator at `endpoint` (host:port), opened in the background.

    Args:
        hello: the greeting to send.
        join_timeout_s: how long to try to connect, in seconds.
        tls: the certificates; None for unencrypted connections.
        lost_after_s: how long the coordinator may be silent before it counts as lost, in seconds.
            Once the link is connected, the value from the host's greeting applies instead.
        is_last: whether this is the last link that this process will open.

    Attributes:
        is_connected: True once the coordinator has been reached.
        lost_because: why the link has ended; "" until then.
        last_error: the error of the latest attempt to connect.
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
        is_last: bool = True,
    ) -> None:
        self._is_last = is_last
        self.lost_because = ""
        self.last_error = ""
        self.is_connected = False
        self._tls = tls
        self._lost_after_s = lost_after_s
        self._beat_s = BEAT_S
        self._endpoint = endpoint
        self._secret = secret
        self._life: LifeSign | None = None  # set at the first connection, when names resolve
        self._hello = hello
        self._lived = LivedTime(_TICK_S, time.monotonic())
        self._deadline_s = self._now_lived_s() + join_timeout_s
        self._incoming: Mailbox[Command | None] = Mailbox()
        self._state = Session()
        self._token = ""
        self._heard_s = 0.0
        self._is_over = self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="echelon-link", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Send an event. Does not block."""
        with contextlib.suppress(
            RuntimeError
        ):  # the link has ended, which `take` reports with None
            self._loop.call_soon_threadsafe(self._put, pack(event))

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when commands might have arrived."""
        return self._incoming.fileno()

    def take(self) -> list[Command | None]:
        """Return the commands that have arrived, followed by None if the coordinator is lost."""
        return self._incoming.take()

    def close(self) -> None:
        """Close the link, after waiting up to 3 s for pending messages to be sent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin_closing)
        self._thread.join(_CLOSE_S)
        self._incoming.close()

    def _put(self, message: bytes) -> None:
        self._state.put(message)
        self._wake.set()

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._wake.set()
        if not self.is_connected and self._task is not None:
            self._task.cancel()

    def _serve(self) -> None:
        try:
            self._task = self._loop.create_task(self._session())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self.lost_because = "the link was closed"
        except (grpc.RpcError, LaunchError, OSError, TimeoutError, asyncio.TimeoutError) as err:
            self.lost_because = self.lost_because or _describe(err)
        finally:
            if self._life is not None:
                self._life.close()
            self._incoming.put(None)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            if self._is_last:
                self._loop.close()
            else:  # gRPC has one poller for all loops and still calls into this one after its end
                _retired.append(self._loop)

    async def _session(self) -> None:
        """Connect, and reconnect after failures, until the session ends.

        Raises:
            LaunchError: the coordinator is lost.
        """
        ticker = self._loop.create_task(self._tick())
        try:
            await self._connections()
        finally:
            ticker.cancel()

    def _now_lived_s(self) -> float:
        return self._lived.at(time.monotonic())

    async def _tick(self) -> None:
        while True:
            self._lived.tick(time.monotonic())
            if self._life is not None:
                self._life.clear()
            await asyncio.sleep(_TICK_S)

    async def _connections(self) -> None:
        while True:
            try:
                async with open_channel(self._endpoint, self._tls) as channel:
                    await self._dial(channel)
                    await self._connection(channel)
            except (grpc.RpcError, asyncio.TimeoutError, OSError) as err:
                if not self.is_connected and not self._may_dial_again(err):
                    raise
                self.last_error = _describe(err)
                await asyncio.sleep(_DIAL_S)
            if self._is_over or self._is_closing:
                return
            if not isinstance(self._hello, Hello):
                raise LaunchError(self.last_error or "the connection was closed")
            if self.is_connected:
                # The stream broke; the next one resumes the session.
                self._deadline_s = self._heard_s + self._lost_after_s

    def _may_dial_again(self, error: BaseException) -> bool:
        """Return whether to retry after a connection attempt or a greeting has failed."""
        code = getattr(error, "code", None)
        if callable(code) and code() == grpc.StatusCode.UNAUTHENTICATED:
            return False
        return isinstance(self._hello, Hello) and self._now_lived_s() < self._deadline_s

    async def _connection(self, channel: grpc.aio.Channel) -> None:
        if self._life is None and isinstance(self._hello, Hello):
            self._life = LifeSign(self._endpoint)
            self._hello = replace(self._hello, life_port=self._life.port)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        try:
            try:
                seal = await self._greet(call)
            except asyncio.TimeoutError:
                self._check_silence()  # `_dial` may have found a dead connection ready
                raise
            sender = self._loop.create_task(self._send_all(call, seal))
            try:
                await self._receive_all(call, seal, sender)
            finally:
                sender.cancel()
                await asyncio.wait({sender})
        finally:
            call.cancel()

    async def _greet(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> Seal:
        nonce = new_nonce()
        await self._write(call, nonce)
        seal = Seal(self._secret, nonce, await self._read(call), is_host=False)
        greeting: Event = self._hello
        if self._token and isinstance(self._hello, Hello):
            received = self._state.received
            greeting = Resume(node=self._hello.node, token=self._token, received=received)
        await self._write(call, seal.close(pack(greeting)))
        welcome = unpack(seal.open(await self._read(call)))
        if not isinstance(welcome, Welcome):
            raise LaunchError("the coordinator sent an unexpected handshake")
        self._token = welcome.token
        self._lost_after_s = welcome.lost_after_ms / 1e3
        self._beat_s = welcome.beat_ms / 1e3
        self._state.resume(welcome.received)
        self._heard_s = self._now_lived_s()
        self.is_connected = True
        return seal

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], frame: bytes) -> None:
        await asyncio.wait_for(_write(call, frame), self._greeting_s)

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> bytes:
        frame = await asyncio.wait_for(call.read(), self._greeting_s)
        if not isinstance(frame, bytes):
            raise await _why_ended(call)
        return frame

    @property
    def _greeting_s(self) -> float:
        """The timeout for each frame of the handshake, in seconds."""
        if self.is_connected:
            return self._silence_s
        left_s = self._deadline_s - self._now_lived_s()
        return min(_GREETING_S, max(left_s, _LEAST_GREETING_S))

    @property
    def _silence_s(self) -> float:
        """How long a stream can be silent before the link reconnects, in seconds."""
        return min(self._lost_after_s, max(self._lost_after_s / _TRIES, _LEAST_SILENCE_S))

    @property
    def _perhaps(self) -> str:
        return ", or TLS fails: see --rdzv-cert and --rdzv-ca on both sides" if self._tls else ""

    async def _dial(self, channel: grpc.aio.Channel) -> None:
        state = channel.get_state(try_to_connect=True)
        while state != grpc.ChannelConnectivity.READY:
            if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                self.last_error = await _why_not(self._endpoint) or self.last_error
                if self.is_connected and self.last_error == _REFUSED:
                    raise LaunchError("the connection was closed, and a new one was refused")
            if self._now_lived_s() > self._deadline_s:
                self._check_silence()
                tried = f"could not reach the coordinator at {self._endpoint} in time"
                why = f" (last error: {self.last_error})" if self.last_error else ""
                raise LaunchError(f"{tried}{why}{self._perhaps}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(channel.wait_for_state_change(state), _DIAL_S)
            state = channel.get_state(try_to_connect=True)

    def _check_silence(self) -> None:
        """Raise LaunchError if the coordinator, once reached, has been silent for too long."""
        if self.is_connected and self._now_lived_s() > self._deadline_s:
            raise LaunchError(f"no heartbeat for {self._lost_after_s:g} s")

    async def _send_all(self, call: grpc.aio.StreamStreamCall[bytes, bytes], seal: Seal) -> None:
        while True:
            self._wake.clear()
            while (frame := self._state.frame()) is not None:
                await _write(call, seal.close(frame))
            if self._is_closing and self._state.is_idle:
                await _write(call, seal.close(self._state.goodbye()))
                await call.done_writing()
                return
            if self._state.owes_acknowledgement:
                await _write(call, seal.close(self._state.beat()))
            try:
                await asyncio.wait_for(self._wake.wait(), self._beat_s)
            except asyncio.TimeoutError:
                await _write(call, seal.close(self._state.beat()))

    async def _receive_all(
        self, call: grpc.aio.StreamStreamCall[bytes, bytes], seal: Seal, sender: asyncio.Task[None]
    ) -> None:
        while True:
            frame = await asyncio.wait_for(call.read(), self._silence_s)
            if not isinstance(frame, bytes):
                return  # end of the stream
            self._heard_s = self._now_lived_s()
            message = self._state.take(seal.open(frame))
            if message is not None:
                command = unpack(message)
                if isinstance(command, Over):
                    self._is_over = True
                    self._state.owe_acknowledgement()
                self._incoming.put(command)  # type: ignore[arg-type]
            self._wake.set()  # an acknowledgement may have made room
            if sender.done() and sender.exception() is not None:
                raise OSError(f"cannot send to the coordinator: {sender.exception()}")


async def _write(call: grpc.aio.StreamStreamCall[bytes, bytes], frame: bytes) -> None:
    """Write a frame to a stream.

    Raises:
        LaunchError: the stream has ended because the host refused this node.
        OSError: the stream has ended for another reason.
    """
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        raise await _why_ended(call) from None


async def _why_ended(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> LaunchError | OSError:
    """Return why a stream ended: a LaunchError if the host refused this node, else an OSError."""
    if await call.code() == grpc.StatusCode.UNAUTHENTICATED:
        return LaunchError(await call.details())
    return OSError("the connection was closed")


async def _why_not(endpoint: str) -> str:
    """Try to connect to an endpoint; return the reason for a failure, or "" on success."""
    host, _, port = endpoint.rpartition(":")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(opening, _PROBE_S)
    except ConnectionRefusedError:
        return _REFUSED
    except asyncio.TimeoutError:
        return "no answer"
    except OSError as err:
        return str(err.strerror or err).lower()
    writer.close()
    return ""


def open_channel(endpoint: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    """Return a channel to "host:port", unencrypted if `tls` is None."""
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=OPTIONS)
    return grpc.aio.secure_channel(endpoint, tls.for_client(), options=OPTIONS)


def _describe(error: BaseException) -> str:
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error) or type(error).__name__
