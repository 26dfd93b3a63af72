"""Send bytes and read replies on one of a client's connections. Every call has a deadline.

Only one thread at a time is allowed to read, and only one is allowed to write. A receive call
blocks in the kernel for at most one second, and then checks the deadline again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from echelon.errors import StoreConnectionError, StoreProtocolError
from echelon.store.deadline import Deadline
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.keepalive import keep_alive
from echelon.store.wire.seal import Opener, Sealer, stream_keys

_RECEIVE_BYTES = 64 << 10
_SLICE_S = 1.0  # a receive returns after this long to look at the deadline
_SLICE = struct.pack("ll", int(_SLICE_S), 0)  # struct timeval
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
_CONNECT_S = 10.0  # for one attempt at one address; the caller's deadline bounds all of them
_FIRST_S = 2.0  # ... while there is another address to try


_FALSE_SERVER = "the server does not know this client's secret, so it is not the job's server"


class Channel:
    """A connected socket that has passed the handshake.

    Attributes:
        instance: random bytes that change when echelon's server restarts; b"" for torch's server.
        num_unconfirmed: the number of commands sent since the last reply.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_buffer",
        "_header",
        "_opener",
        "_poller",
        "_sealer",
        "_socket",
        "instance",
        "num_unconfirmed",
    )

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._poller = select.poll()
        self._poller.register(connected, select.POLLIN)
        self._buffer = b""
        self._at = 0
        self._header: tuple[int, int, int] | None = None
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self.instance = b""
        self.num_unconfirmed = 0

    @property
    def is_ours(self) -> bool:
        """True if the server supports echelon's extensions."""
        return bool(self.instance)

    def seal(self, to_server: bytes, to_client: bytes) -> None:
        """Send and accept only sealed records from now on.

        Raises:
            StoreConnectionError: unsealed bytes were received after the handshake.
        """
        if self._at < len(self._buffer):
            raise StoreConnectionError("the server sent unsealed bytes after its proof")
        self._sealer, self._opener = Sealer(to_server), Opener(to_client)

    @property
    def descriptor(self) -> int:
        """The socket's file descriptor, or -1 if it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; the server then cancels the waits that are pending on it."""
        self._socket.close()

    @property
    def peer(self) -> Address:
        """The server's numeric address."""
        return self._socket.family, self._socket.getpeername()

    def interrupt(self) -> None:
        """Make all calls that are blocked on this channel fail. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def is_stale(self) -> bool:
        """Return True if the server has closed the connection or sent unsolicited data."""
        return bool(self._poller.poll(0)) or self._at < len(self._buffer)

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of the data.

        Raises:
            TimeoutError: the server did not accept the data in time.
            OSError: the connection broke.
        """
        if self._sealer is not None:
            data = self._sealer.seal(data)
        try:
            sent = self._socket.send(data, _NO_WAIT)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return
        rest = memoryview(data)[sent:]
        writable = select.poll()  # one of its own: another thread may poll for answers
        writable.register(self._socket, select.POLLOUT)
        while rest:
            if not writable.poll(deadline.left_s * 1000):
                raise TimeoutError("the server is not reading from the connection")
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._socket.send(rest, _NO_WAIT) :]

    def take(self, size: int, deadline: Deadline) -> bytes:
        """Return the next `size` bytes of the reply.

        Raises:
            TimeoutError: not all bytes arrived in time. The bytes received so far are kept for a
                later call.
            ConnectionError: the server closed the connection.
        """
        end = self._at + size
        if end > len(self._buffer):
            self._fill(size, deadline)
            end = size
        data = self._buffer[self._at : end]
        self._at = end
        return data

    def _fill(self, size: int, deadline: Deadline) -> None:
        """Receive bytes until the buffer contains at least `size` bytes."""
        pieces = [self._buffer[self._at :]]
        have = len(pieces[0])
        self._at = 0
        try:
            while have < size:
                pieces.append(self._receive(max(_RECEIVE_BYTES, size - have), deadline))
                have += len(pieces[-1])
        finally:
            self._buffer = b"".join(pieces)

    def _receive(self, size: int, deadline: Deadline) -> bytes:
        while True:
            left_s = deadline.left_s
            if left_s <= _SLICE_S and not self._poller.poll(left_s * 1000):
                raise TimeoutError("the server did not answer")
            try:
                data = self._socket.recv(size)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionResetError("the server closed the connection")
            if self._opener is None:
                return data
            try:
                data = self._opener.open(data)
            except StoreProtocolError as error:
                raise ConnectionAbortedError(str(error)) from None
            if data:
                return data

    def take_string(self, deadline: Deadline) -> bytes:
        """Return the next string of a reply from torch's server."""
        return self.take(p.unpack_u64(self.take(8, deadline)), deadline)

    def take_int(self, deadline: Deadline) -> int:
        """Return the next i64 of a reply from torch's server."""
        return p.unpack_i64(self.take(8, deadline))

    def take_frame(self, deadline: Deadline) -> tuple[int, int, bytes]:
        """Return the status, tag and payload of the next answer to one of echelon's queries.

        After a TimeoutError, call again to continue reading the same answer.
        """
        if self._header is None:
            self._header = p.unpack_frame_header(self.take(p.FRAME_HEADER_BYTES, deadline))
        status, tag, length = self._header
        payload = self.take(length, deadline)
        self._header = None
        return status, tag, payload

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the server to close the connection; return whether it did so in time."""
        ended = select.poll()
        ended.register(self._socket, getattr(select, "POLLRDHUP", 0))
        return bool(ended.poll(timeout_s * 1000))


@dataclass(frozen=True)
class Place:
    """The address of a store, and the client's credentials.

    Attributes:
        host, port: the address of the server.
        secret: the shared secret, or None if the server does not require one.
        session: bytes that identify the client to echelon's server across connections.
    """

    host: str
    port: int
    secret: bytes | None = field(repr=False)
    session: bytes = field(default_factory=trust.new_session, repr=False)


def connect(place: Place, known: tuple[Address, ...], deadline: Deadline) -> Channel:
    """Connect to a store server and perform the handshake.

    Args:
        known: addresses to try before the host's name is resolved.

    Raises:
        OSError: no address could be reached, or the server closed the connection. A retry might
            succeed.
        StoreConnectionError: the server was reached but does not accept this client.
    """
    channel = Channel(_dial(place, known, deadline))
    try:
        _shake_hands(channel, place, deadline)
    except BaseException:
        channel.close()
        raise
    return channel


Address = tuple[int, "tuple[Any, ...]"]  # family, and what connect() takes


def _dial(place: Place, known: tuple[Address, ...], deadline: Deadline) -> socket.socket:
    """Return a socket connected to the server."""
    problem: OSError = ConnectionRefusedError(f"{place.host} has no address")
    for family, address in known:
        try:
            return _dial_one(family, address, min(_CONNECT_S, deadline.left_s))
        except OSError as error:
            problem = error
    if isinstance(problem, ConnectionRefusedError) and known:
        raise problem  # the machine answers; another address would not
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys((info[0], info[4]) for info in found))
    for index, (family, address) in enumerate(addresses):
        is_last = index + 1 == len(addresses)
        limit_s = _CONNECT_S if is_last else _FIRST_S  # one that is dead must not cost it all
        try:
            return _dial_one(family, address, min(limit_s, deadline.left_s))
        except OSError as error:
            problem = error
    raise problem


def _dial_one(family: int, address: tuple[Any, ...], timeout_s: float) -> socket.socket:
    dialled = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialled.settimeout(max(0.001, timeout_s))
        dialled.connect(address)
        if dialled.getsockname() == dialled.getpeername():
            # Linux lets a socket meet itself when nothing listens on an ephemeral port.
            raise ConnectionRefusedError("nothing is listening at this address")
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(dialled)
        dialled.settimeout(None)
        if _NO_WAIT:
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        else:
            dialled.setblocking(False)
    except BaseException:
        dialled.close()
        raise
    return dialled


def _shake_hands(channel: Channel, place: Place, deadline: Deadline) -> None:
    """Perform the handshake, and determine whether the server is echelon's or torch's."""
    secret = place.secret
    opening = p.encode(p.VALIDATE, p.VALIDATE_MAGIC) + p.encode(p.PING, p.OUR_NONCE)
    channel.send(opening, deadline)
    answer = channel.take(4, deadline)
    if answer == p.pack_u32(p.OUR_NONCE):
        if secret is not None:
            raise StoreConnectionError(
                "the server is a torch TCPStore, which does not support secrets"
            )
        return
    if answer != p.pack_u32(p.OUR_ANSWER):
        raise StoreProtocolError(
            f"the server answered PING with {answer.hex()}, so it is not a store server"
        )
    client_nonce = trust.new_nonce()
    channel.send(p.tagged(p.HELLO, 1, client_nonce, p.EXTENSION_VERSION, place.session), deadline)
    instance, server_nonce, proof = _take_welcome(channel, deadline)
    if secret is not None:
        if len(server_nonce) != trust.NONCE_BYTES:
            raise StoreConnectionError(_FALSE_SERVER)
        transcript = trust.transcript(client_nonce, server_nonce, place.session, instance)
        if not trust.is_equal(proof, trust.server_proof(secret, transcript)):
            raise StoreConnectionError(_FALSE_SERVER)
        channel.send(p.tagged(p.PROOF, 1, trust.client_proof(secret, transcript)), deadline)
        channel.seal(*stream_keys(secret, transcript))
        _take_ok(channel, deadline)
    elif server_nonce:
        raise StoreConnectionError("the server requires a secret: pass secret=...")
    channel.instance = instance


def _take_ok(channel: Channel, deadline: Deadline) -> bytes:
    """Return the payload of the next answer in the handshake.

    Raises:
        StoreConnectionError: the server refuses this client.
    """
    status, _, payload = channel.take_frame(deadline)
    if status != p.OK:
        raise StoreConnectionError(payload.decode("utf-8", "replace"))
    return payload


def _take_welcome(channel: Channel, deadline: Deadline) -> tuple[bytes, bytes, bytes]:
    """Read an echelon server's answer to HELLO; return the server's instance, nonce and proof."""
    parts = p.unpack_strings(_take_ok(channel, deadline))
    if len(parts) != 3 or not parts[0]:
        raise StoreProtocolError("the server's answer to the handshake cannot be read")
    return parts[0], parts[1], parts[2]
