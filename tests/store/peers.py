"""Peers for the store's tests: raw sockets, server processes, and polling with a deadline."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from echelon.store.wire import protocol as p

OPENING = p.encode(p.VALIDATE, p.VALIDATE_MAGIC)
SYNC = p.encode(p.PING, 7)
SYNCED = p.pack_u32(7)
PATIENCE_S = 60.0


class Raw:
    """A raw connection: sends bytes, takes exact replies."""

    def __init__(
        self, port: int, *, opening: bytes = OPENING, host: str = "127.0.0.1", source: str = ""
    ) -> None:
        self.socket = socket.create_connection(
            (host, port), timeout=PATIENCE_S, source_address=(source, 0) if source else None
        )
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if opening:
            self.send(opening)

    def send(self, *pieces: bytes) -> None:
        self.socket.sendall(b"".join(pieces))

    def take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError(f"closed after {data!r}")
            data += piece
        return data

    def take_string(self) -> bytes:
        return self.take(p.unpack_u64(self.take(8)))

    def take_frame(self, tag: int = 1) -> tuple[int, bytes]:
        """Take the next frame, which must be of this tag."""
        status, answered, length = p.unpack_frame_header(self.take(p.FRAME_HEADER_BYTES))
        payload = self.take(length)
        assert answered == tag, (status, answered, payload)
        return status, payload

    def sync(self) -> None:
        """Return once the server has carried out what was sent; nothing else may be unread."""
        self.send(SYNC)
        assert self.take(4) == SYNCED

    def is_closed_by_server(self) -> bool:
        """Wait until the server closes; what it still sends is dropped."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Leave as a killed process or a pulled cable does: no goodbye."""
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ours(port: int) -> Raw:
    """A raw connection that has announced itself as our client."""
    raw = Raw(port, opening=OPENING + p.encode(p.PING, p.OUR_NONCE))
    assert raw.take(4) == p.pack_u32(p.OUR_ANSWER)
    return raw


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: it does not within the patience of these tests.
    """
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.002)


def all_have_left(server: Any, num_staying: int = 0) -> None:
    """Wait until the server has seen every earlier connection come and go.

    A connection is accepted after those that were made before it: once a last one is served,
    none is still in the queue.
    """
    with Raw(server.port) as last:
        last.sync()
        until(
            lambda: server.statistics().num_connections == num_staying + 1,
            "all earlier connections are gone",
        )
    until(lambda: server.statistics().num_connections == num_staying, "the last one is gone")


@contextmanager
def server_process(*arguments: str) -> Iterator[int]:
    """Run `python -m echelon.store` on a free port; yield the port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon.store", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


class Background:
    """A call in a thread; `result` joins it and returns or raises what it did."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: tuple[bool, Any] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = (True, self._call())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._outcome = (False, error)

    @property
    def is_done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert self._outcome is not None, "the call did not return"
        succeeded, value = self._outcome
        if succeeded:
            return value
        raise value


@contextmanager
def closing_all() -> Iterator[Callable[[Any], Any]]:
    """Yield a function that notes things to close."""
    with contextlib.ExitStack() as stack:

        def note(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        yield note
