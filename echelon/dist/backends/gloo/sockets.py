"""Transfer a group's messages as byte streams over TCP, separately from Gloo's connections.

Gloo's sends and receives cannot be polled or interrupted, and they do not report which peer failed.
Messages therefore have their own connections, which are opened on demand. Each connection transfers
data in one direction only, so closing it never discards bytes in flight.

A connection begins with 40 bytes from the sender, including its rank and a digest of a secret that
the group shares through its store. The digest keeps other programs out, but the data is not
encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from echelon.dist.messages.driver import StreamBroken

SECRET_BYTES = 32
_HELLO = struct.Struct("<4sI32s")
_MAGIC = b"ecm1"
_IN_PROGRESS = frozenset({errno.EINPROGRESS, errno.EAGAIN, errno.EWOULDBLOCK})
_NOT_NOW = (BlockingIOError, InterruptedError)
_MAX_STRANGERS = 64
_READ_ON_S = 0.2

Address = tuple[str, int]


@dataclass(slots=True)
class _Out:
    """An outgoing connection, on which this rank writes to a peer."""

    socket: socket.socket
    hello: bytes  # what is left of it
    is_connected: bool = False
    is_full: bool = False
    has_ended: bool = False


class Sockets:
    """One rank's byte streams to and from the other ranks of a group.

    Only one thread is allowed to use the streams, but any thread can call `wake` and `has_unread`.
    """

    slice_s = 5.0

    def __init__(self, rank: int, address: str) -> None:
        """Listen on an address of this host for connections from peers.

        Raises:
            OSError: this host has no such address.
        """
        self._rank = rank
        self._addresses: list[Address] = []
        self._secret = b""
        self._out: dict[int, _Out] = {}
        self._in: dict[int, socket.socket] = {}
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._peers: dict[int, int] = {}  # of descriptors
        self._ending: dict[int, tuple[str, float]] = {}  # why, and until when to read on
        self._writable: set[int] = set()
        self._dropped: set[int] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.ExitStack() as made:
            self._listener = made.enter_context(socket.socket(family, socket.SOCK_STREAM))
            self._listener.bind((address, 0))
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            made.callback(os.close, self._bell)
            self._poll = made.enter_context(select.epoll())
            self._poll.register(self._listener, select.EPOLLIN)
            self._poll.register(self._bell, select.EPOLLIN)
            made.pop_all()

    @property
    def address(self) -> Address:
        """The address that other ranks connect to."""
        found = self._listener.getsockname()
        return str(found[0]), int(found[1])

    def introduce(self, addresses: list[Address], secret: bytes) -> None:
        """Set the addresses of all ranks, and the group's secret (SECRET_BYTES bytes)."""
        self._addresses = addresses
        self._secret = secret

    # ---- the driver's side ----

    def open(self, peer: int) -> None:
        """Start connecting to a peer, so that its exit is detected even if it never sends data."""
        if peer in self._out or peer in self._dropped:
            return
        host, port = self._addresses[peer]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out[peer] = _Out(made, _hello(self._secret, self._rank, peer), is_full=True)
        self._peers[made.fileno()] = peer
        self._poll.register(made, select.EPOLLIN | select.EPOLLOUT)
        code = made.connect_ex((host, port))
        if code and code not in _IN_PROGRESS:
            self._end_out(peer, os.strerror(code))

    def drop(self, peer: int) -> None:
        """Close the connections to and from a peer."""
        self._dropped.add(peer)
        self._writable.discard(peer)
        self._ending.pop(peer, None)
        out, coming = self._out.pop(peer, None), self._in.pop(peer, None)
        for one in (None if out is None else out.socket, coming):
            if one is not None:
                self._forget(one)
                one.close()

    def wait(self, timeout_s: float) -> list[int]:
        """Block until a connection is ready or the timeout expires; return the peers with data."""
        readable = []
        if self._ending:
            timeout_s = min(timeout_s, _READ_ON_S / 4)
        for fd, events in self._poll.poll(timeout_s):
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._strangers:
                readable += self._identify(fd)
            elif fd in self._peers:
                peer = self._peers[fd]
                incoming = self._in.get(peer)
                if incoming is not None and incoming.fileno() == fd:
                    readable.append(peer)
                else:
                    self._continue(peer, events)
        return readable

    def writable(self) -> list[int]:
        """Return the peers whose connections were full and now accept data again."""
        found = list(self._writable)
        self._writable.clear()
        return found

    def broken(self) -> list[tuple[int, str]]:
        """Return the peers whose connections have ended, with the reason for each.

        A peer is returned only after the connection from that peer has been read to the end, so
        that no data is lost.
        """
        now = time.monotonic()
        found = []
        for peer, (why, until_s) in list(self._ending.items()):
            if peer not in self._in and now >= until_s:
                found.append((peer, why))
                del self._ending[peer]
        return found

    def read(self, peer: int, view: memoryview) -> int:
        """Read the bytes that have arrived from a peer.

        Raises:
            StreamBroken: the connection broke, or the peer closed it.
        """
        incoming = self._in.get(peer)
        if incoming is None:
            return 0
        try:
            num_bytes = incoming.recv_into(view)
        except _NOT_NOW:
            return 0
        except OSError as err:
            raise StreamBroken(_text(err)) from err
        if not num_bytes:
            raise StreamBroken("the peer closed the connection")
        return num_bytes

    def has_unread(self, peer: int) -> bool:
        """Return whether unread bytes from a peer have arrived. Safe to call on any thread."""
        incoming = self._in.get(peer)
        try:
            return incoming is not None and bool(incoming.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def write(self, peer: int, views: list[memoryview]) -> int:
        """Write as many bytes as the connection accepts; return the number of bytes written.

        If the connection has ended, nothing is written, and `broken` will return the peer.

        Raises:
            StreamBroken: the connections to this peer were dropped.
        """
        if peer in self._dropped:
            raise StreamBroken("the peer closed the connection")
        self.open(peer)
        out = self._out[peer]
        if not out.is_connected or out.has_ended:
            return 0
        try:
            while out.hello:
                out.hello = out.hello[out.socket.send(out.hello) :]
            return out.socket.sendmsg(views)
        except _NOT_NOW:
            self._set_full(out, True)
        except OSError as err:
            self._end_out(peer, _text(err))
        return 0

    def wake(self) -> None:
        """Interrupt the current `wait` call or, if none is in progress, the next one."""
        if not self._is_closed:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection; the peers detect this immediately."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self._sockets():
            one.close()
        self._poll.close()
        os.close(self._bell)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the connections."""
        self._is_closed = True
        descriptors = [one.detach() for one in self._sockets()]
        for fd in (*descriptors, self._bell):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._poll.close()

    # ---- connections ----

    def _sockets(self) -> list[socket.socket]:
        strangers = [one for one, _ in list(self._strangers.values())]
        out = [one.socket for one in list(self._out.values())]
        return [self._listener, *strangers, *out, *list(self._in.values())]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                made, _ = self._listener.accept()
                made.setblocking(False)
                if len(self._strangers) >= _MAX_STRANGERS:
                    self._turn_away(next(iter(self._strangers)))
                self._strangers[made.fileno()] = (made, bytearray())
                self._poll.register(made, select.EPOLLIN)

    def _identify(self, fd: int) -> list[int]:
        """Read a new connection's greeting.

        Returns:
            [peer] if the peer has been identified, otherwise [].
        """
        made, hello = self._strangers[fd]
        try:
            hello += made.recv(_HELLO.size - len(hello))
        except _NOT_NOW:
            return []
        except OSError:
            hello.clear()
        if 0 < len(hello) < _HELLO.size:
            return []
        peer = -1
        if len(hello) == _HELLO.size:
            _, peer, _ = _HELLO.unpack(hello)
        is_known = 0 <= peer < len(self._addresses) and peer != self._rank
        expected = _hello(self._secret, peer, self._rank) if is_known else b""
        if not hmac.compare_digest(bytes(hello), expected) or not is_known or peer in self._in:
            self._turn_away(fd)
            return []
        del self._strangers[fd]
        if peer in self._dropped:
            self._forget(made)
            made.close()
            return []
        self._in[peer] = made
        self._peers[fd] = peer
        return [peer]

    def _turn_away(self, fd: int) -> None:
        made, _ = self._strangers.pop(fd)
        self._forget(made)
        made.close()

    def _continue(self, peer: int, events: int) -> None:
        """Handle an outgoing connection that was established, became writable or was closed."""
        out = self._out[peer]
        if not out.is_connected:
            code = out.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end_out(peer, os.strerror(code))
                return
            out.is_connected = True
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            why = _end_of(out.socket)
            if why:
                self._end_out(peer, why)
                return
        if events & select.EPOLLOUT:
            self._set_full(out, False)
            self._writable.add(peer)

    def _end_out(self, peer: int, why: str) -> None:
        out = self._out[peer]
        if not out.has_ended:
            out.has_ended = True
            self._forget(out.socket)
            out.socket.close()
            self._ending[peer] = (why, time.monotonic() + _READ_ON_S)

    def _set_full(self, out: _Out, is_full: bool) -> None:
        if out.is_full != is_full:
            out.is_full = is_full
            events = select.EPOLLIN | (select.EPOLLOUT if is_full else 0)
            self._poll.modify(out.socket, events)

    def _forget(self, one: socket.socket) -> None:
        self._peers.pop(one.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(one)


def _hello(secret: bytes, sender: int, receiver: int) -> bytes:
    text = b"%d to %d" % (sender, receiver)
    return _HELLO.pack(_MAGIC, sender, hmac.digest(secret, text, "sha256"))


def _end_of(one: socket.socket) -> str:
    """Return the reason a write-only connection has ended, or "" if the connection is open."""
    try:
        return "the peer sent unexpected bytes" if one.recv(1) else "the peer closed the connection"
    except _NOT_NOW:
        return ""
    except OSError as err:
        return _text(err)


def _text(error: Any) -> str:
    return error.strerror or str(error)
