"""Manage the servers that this process hosts for its stores.

Several masters in one process can share a server on one port, as in torch (`multi_tenant`). The
server stops when the last master is closed.
"""

from __future__ import annotations

import os
import threading
import weakref

from echelon.errors import StoreError


class Hosted:
    """A server in this process, and the number of stores that share it.

    Attributes:
        port: the port that the server listens on.
        pid: the ID of the process that hosts the server.
    """

    def __init__(self, host: str, port: int, secret: bytes | None, listen_fd: int | None) -> None:
        from echelon.store.server.server import StoreServer

        self._server = StoreServer(
            host, port, secret=secret, listen_fd=listen_fd, bind_all_if_foreign=True
        ).start()
        self.port = self._server.port
        self.pid = os.getpid()
        self._num_stores = 1

    def share(self) -> Hosted:
        """Count one more store that shares the server, and return this object."""
        self._num_stores += 1
        return self

    def leave(self) -> None:
        """Detach one store. When the last store leaves, stop the server and wait for it to stop."""
        if self._is_last():
            self._server.close()

    def leave_soon(self) -> None:
        """Detach one store. When the last store leaves, stop the server without waiting for it.

        Safe to call from a finalizer.
        """
        if self._is_last():
            self._server.stop_soon()

    def _is_last(self) -> bool:
        with _shared_lock:
            self._num_stores -= 1
            if self._num_stores == 0 and _shared.get(self.port) is self:
                del _shared[self.port]
            return self._num_stores == 0


_shared: weakref.WeakValueDictionary[int, Hosted] = weakref.WeakValueDictionary()
# Reentrant: the collector may run a store's finalizer inside any allocation of the same thread.
_shared_lock = threading.RLock()


def host(
    address: str, port: int, secret: bytes | None, multi_tenant: bool, listen_fd: int | None
) -> Hosted:
    """Start a server or, with `multi_tenant`, share a server already hosted on the port."""
    shared = _share(port) if multi_tenant else None
    if shared is not None:
        return shared
    try:
        hosted = Hosted(address, port, secret, listen_fd)
    except StoreError:  # another thread may have begun to host it just now
        shared = _share(port) if multi_tenant else None
        if shared is None:
            raise
        return shared
    if multi_tenant:
        with _shared_lock:
            _shared[hosted.port] = hosted
    return hosted


def _share(port: int) -> Hosted | None:
    with _shared_lock:
        hosted = _shared.get(port)
        return None if hosted is None else hosted.share()
