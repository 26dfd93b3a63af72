"""Measure latency, bandwidth and clock offset between two hosts over one TCP connection.

One host listens on a free port, and the other host takes measurements by sending these messages:

    TOKEN            once, 32 bytes; a client without the right token is disconnected
    b"p" ...         9 bytes: a ping; the answer is 8 bytes, the listener's wall clock in ns
    b"d" length ...  9 bytes, then `length` bytes of data; answered like a ping after the last byte
    b"u" length      9 bytes; the answer is `length` bytes

The bandwidth measurement starts with 64 KiB of data and doubles the amount until a transfer takes
at least 50 ms. Slow and fast links are therefore measured in about the same time. The result is
based on the duration of the fastest of three transfers of the final size, minus one round trip.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time

from echelon.launcher.doctor.probes.finding import NETWORK, Finding, State, Task

GREETING = b"echelon"  # sent to each client, because the check before a job expects it
_TIMEOUT_S = 5.0  # of one exchange
_NUM_PINGS = 40
_SMALLEST, _LARGEST = 1 << 16, 1 << 26
_ENOUGH_S = 0.05
_NUM_REPEATS = 2
_SLOW_S = 1.0  # a transfer that took longer is not repeated
_BLOCK = 1 << 18
_FRAME = struct.Struct("<cQ")
_STAMP = struct.Struct("<Q")
_CLOCK_S = 1.0  # with a larger offset, the logs of two hosts cannot be compared


def new_token() -> str:
    """Return a new random token, which a listener requires its clients to send."""
    return secrets.token_hex(16)


class Listener:
    """A server on a free port that answers the measurement requests of other hosts."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=both
        )
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="echelon-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port, and wait up to 5 s for the accepting thread to end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()
        self._thread.join(_TIMEOUT_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # closed, or no thread can be started
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, struct.error):
            client.settimeout(_TIMEOUT_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(GREETING)
            if hmac.compare_digest(_read(client, len(self._token)), self._token):
                _answer(client)


def _answer(client: socket.socket) -> None:
    """Answer a client's measurement requests until the connection ends.

    Raises:
        OSError: the client disconnected or timed out.
    """
    block = bytearray(_BLOCK)
    while True:
        kind, length = _FRAME.unpack(_read(client, _FRAME.size))
        if length > _LARGEST:
            return
        if kind == b"u":
            client.sendall(bytes(length))
            continue
        if kind == b"d":
            _skip(client, length, block)
        client.sendall(_STAMP.pack(time.time_ns()))


def probe_pair(task: Task) -> Finding:
    """Measure the link to the listener that a task names. Each exchange can take up to 5 s."""
    try:
        figures = _measure(task)
    except (OSError, struct.error) as err:
        # A timeout of connect has an errno; a timeout of send or recv does not.
        why = getattr(err, "strerror", None) or str(err) or type(err).__name__
        text = f"cannot reach {task.peer or task.address} ({task.address} port {task.port}): {why}"
        return Finding(probe=NETWORK, state=State.BROKEN, text=text)
    text = (
        f"to {task.peer or task.address}: {figures['latency_s'] * 1e6:.0f} us, "
        f"{figures['sent_bytes_per_s'] / 1e6:.0f} MB/s out, "
        f"{figures['received_bytes_per_s'] / 1e6:.0f} MB/s in"
    )
    if abs(figures["ahead_s"]) > _CLOCK_S:
        text += f"; its clock is {figures['ahead_s']:+.1f} s off this one"
    return Finding(probe=NETWORK, state=State.WHOLE, text=text, figures=figures)


def _measure(task: Task) -> dict[str, float]:
    """Return the link's latency, its bandwidth in each direction, and the clock offset.

    Raises:
        OSError: the connection failed, or an answer did not arrive in time.
    """
    with socket.create_connection((task.address, task.port), timeout=_TIMEOUT_S) as server:
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _read(server, len(GREETING)) != GREETING:
            raise OSError("another service is listening at this address")
        server.sendall(task.token.encode())
        trips, ahead_s = _ping(server)
        trip_s = trips[0]
        sent = _transfer(server, trip_s, is_upload=False)
        received = _transfer(server, trip_s, is_upload=True)
    return {
        "latency_s": trips[len(trips) // 2] / 2,
        "sent_bytes_per_s": sent,
        "received_bytes_per_s": received,
        "ahead_s": ahead_s,
        "clock_error_s": trip_s / 2,
    }


def _ping(server: socket.socket) -> tuple[list[float], float]:
    """Return the sorted round-trip times and the offset of the listener's clock, in seconds."""
    trips: list[float] = []
    ahead_s = 0.0
    for _ in range(_NUM_PINGS):
        began_ns, began_s = time.time_ns(), time.perf_counter()
        server.sendall(_FRAME.pack(b"p", 0))
        (there_ns,) = _STAMP.unpack(_read(server, _STAMP.size))
        took_s = time.perf_counter() - began_s
        if took_s < min(trips, default=float("inf")):  # the middle of the quickest is when it read
            ahead_s = (there_ns - began_ns) / 1e9 - took_s / 2
        trips.append(took_s)
    return sorted(trips), ahead_s


def _transfer(server: socket.socket, trip_s: float, *, is_upload: bool) -> float:
    """Return the bandwidth in one direction, in bytes per second.

    If `is_upload` is true, the listener uploads data to this host. Otherwise, this host uploads
    data to the listener.
    """
    length = _SMALLEST
    while (took_s := _pass(server, length, is_upload)) < _ENOUGH_S + trip_s and length < _LARGEST:
        length *= 2
    if took_s < _SLOW_S:
        took_s = min(took_s, *(_pass(server, length, is_upload) for _ in range(_NUM_REPEATS)))
    return length / max(took_s - trip_s, 1e-6)


def _pass(server: socket.socket, length: int, is_upload: bool) -> float:
    """Transfer `length` bytes once; return the duration in seconds."""
    block = bytearray(_BLOCK)
    data = b"" if is_upload else bytes(length)
    began_s = time.perf_counter()
    server.sendall(_FRAME.pack(b"u" if is_upload else b"d", length))
    if is_upload:
        _skip(server, length, block)
    else:
        server.sendall(data)
        _read(server, _STAMP.size)
    return time.perf_counter() - began_s


def _skip(source: socket.socket, length: int, block: bytearray) -> None:
    view = memoryview(block)
    while length:
        number = source.recv_into(view[: min(length, len(block))])
        if not number:
            raise ConnectionResetError("the connection was closed")
        length -= number


def _read(source: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = source.recv(length - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data
