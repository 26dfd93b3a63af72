"""Servers that stores of this process host, and share.

torch lets several masters of one process share a server by its port (`multi_tenant`); the last
one to close stops it.
"""

from __future__ import annotations

import os
import threading
import weakref


class Hosted:
    """A server in this process, and how many stores share it.

    Attributes:
        port: where it listens.
        pid: the process that hosts it.
    """

    def __init__(self, host: str, port: int, secret: bytes | None, listen_fd: int | None) -> None:
        from echelon.store.server import StoreServer

        self._server = StoreServer(
            host, port, secret=secret, listen_fd=listen_fd, bind_all_if_foreign=True
        ).start()
        self.port = self._server.port
        self.pid = os.getpid()
        self._num_stores = 1

    def share(self) -> Hosted:
        """Count one more store."""
        self._num_stores += 1
        return self

    def leave(self) -> None:
        """Count one store less; the last one stops the server."""
        with _shared_lock:
            self._num_stores -= 1
            if self._num_stores == 0:
                _shared.pop(self.port, None)
                self._server.close()


_shared: weakref.WeakValueDictionary[int, Hosted] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def host(
    address: str, port: int, secret: bytes | None, multi_tenant: bool, listen_fd: int | None
) -> Hosted:
    """Start a server, or share the one that this process has at the port."""
    with _shared_lock:
        if multi_tenant and port in _shared:
            return _shared[port].share()
        hosted = Hosted(address, port, secret, listen_fd)
        if multi_tenant:
            _shared[hosted.port] = hosted
        return hosted
