"""A relay between a client and a server that can be cut: breaks connections, keeps both ends."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable

_JOIN_S = 60.0
_GREETINGS = 2  # packets of a client's handshake with an open server


class Relay:
    """Forward connections to a port until `cut`.

    Attributes:
        port: where clients connect.
        num_accepted: connections so far.
        on_request: called with the number of a client's packet before and after it is forwarded;
            True breaks the connection there.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_accepted = 0
        self.on_request: Callable[[int, bool], bool] | None = None
        self._num_cuts = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            pair = (near, socket.create_connection(("127.0.0.1", self._target)))
            pump = threading.Thread(target=self._pump, args=pair, daemon=True)
            with self._lock:
                self._pairs.append(pair)
                self._threads.append(pump)
                self.num_accepted += 1
            pump.start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        """Forward both ways until either end closes; owns both."""
        num_asked = 0
        with near, far, contextlib.suppress(OSError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    num_asked += source is near
                    if source is near and self._num_cuts and num_asked > _GREETINGS:
                        self._num_cuts -= 1
                        return
                    if source is near and self._breaks(num_asked, is_forwarded=False):
                        return
                    (far if source is near else near).sendall(data)
                    if source is near and self._breaks(num_asked, is_forwarded=True):
                        return

    def _breaks(self, num_asked: int, *, is_forwarded: bool) -> bool:
        return self.on_request is not None and self.on_request(num_asked, is_forwarded)

    def cut_at_next(self, times: int = 1) -> None:
        """Break a connection when its client next sends something, which is not forwarded."""
        self._num_cuts = times

    def cut(self) -> None:
        """Break every connection; new ones are accepted as before."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for near, _far in pairs:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def inject(self, data: bytes) -> None:
        """Send bytes of the relay's own to the server, on the newest connection."""
        self._pairs[-1][1].sendall(data)

    def inject_back(self, data: bytes) -> None:
        """Send bytes of the relay's own to the client, on the newest connection."""
        self._pairs[-1][0].sendall(data)

    def retarget(self, target: int) -> None:
        """Send later connections to another server."""
        self._target = target

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(_JOIN_S)
        self.cut()
        for thread in self._threads:
            thread.join(_JOIN_S)
            assert not thread.is_alive()
