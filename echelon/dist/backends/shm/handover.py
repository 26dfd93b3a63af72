"""Hand a descriptor from one process to others of the same user, over an abstract Unix socket."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time

_PEER_CREDENTIALS = struct.Struct("3i")
_GROUP_RANK = struct.Struct("<I")


class Handover:
    """Group rank 0's socket on which it hands the descriptor to the other members."""

    def __init__(self) -> None:
        self.name = f"echelon-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(128)

    def serve(self, fd: int, missing: set[int], deadline_s: float) -> set[int]:
        """Give `fd` to every group rank in `missing`; return those that did not come in time."""
        while missing:
            left = deadline_s - time.monotonic()
            if left <= 0:
                break
            self._socket.settimeout(left)
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                break
            with peer, contextlib.suppress(OSError):
                peer.settimeout(1.0)  # a stranger that connects and is silent costs one second
                if _uid(peer) == os.getuid():
                    (rank,) = _GROUP_RANK.unpack(peer.recv(_GROUP_RANK.size, socket.MSG_WAITALL))
                    socket.send_fds(peer, [b"fd"], [fd])
                    missing.discard(rank)
        return missing

    def close(self) -> None:
        """Close the socket; its name goes with it."""
        self._socket.close()


def receive(name: str, rank: int, deadline_s: float) -> int:
    """Fetch the segment's descriptor from group rank 0.

    Raises:
        OSError: it is gone, runs under another user, or did not answer by `deadline_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(0.001, deadline_s - time.monotonic()))
        peer.connect(f"\0{name}")
        if _uid(peer) != os.getuid():
            raise PermissionError("the segment's owner runs under another user")
        peer.sendall(_GROUP_RANK.pack(rank))
        _, fds, _, _ = socket.recv_fds(peer, 2, 1)
        if not fds:
            raise ConnectionError("no descriptor came")
        return fds[0]


def _uid(peer: socket.socket) -> int:
    size = _PEER_CREDENTIALS.size
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_PEER_CREDENTIALS.unpack(data)[1])
