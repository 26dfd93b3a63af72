"""Pass file descriptors to other processes of the same user over an abstract Unix socket.

Group rank 0 passes the shared memory to all members. If members are in different PID namespaces,
each member also sends its own pidfd, and rank 0 passes all pidfds to all members. A pidfd can be
watched from any namespace.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import cast

from echelon.store.deadline import time_left_s

_PEER_CREDENTIALS = struct.Struct("3i")
_GROUP_RANK = struct.Struct("<I")
_SLICE_S = 0.1
_RETRY_S = 0.01
_STRANGER_S = 1.0  # what a stranger that sends less than a rank does costs
_MAX_FDS = 128  # of one message; the kernel takes 253

Check = Callable[[], None]


class Handover:
    """The socket on which group rank 0 passes descriptors to the other members."""

    def __init__(self) -> None:
        self.name = f"echelon-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(socket.SOMAXCONN)
        except BaseException:
            self._socket.close()
            raise

    def serve(
        self, fd: int, missing: set[int], deadline_s: float, check: Check, pidfd: int = -1
    ) -> tuple[set[int], dict[int, int]]:
        """Pass `fd` to every group rank in `missing`.

        A slow peer does not delay the other peers.

        Args:
            check: a function that raises an error if a member has died.
            pidfd: this process's pidfd; -1 if the members do not exchange pidfds.

        Returns:
            The ranks that did not connect before the deadline, and the other ranks' pidfds, keyed
            by group rank.
        """
        pidfds: dict[int, int] = {}
        with contextlib.ExitStack() as waiting:
            peers: dict[int, socket.socket] = {}
            selector = waiting.enter_context(selectors.DefaultSelector())
            self._socket.setblocking(False)
            selector.register(self._socket, selectors.EVENT_READ)
            while missing and time.monotonic() < deadline_s:
                check()
                for key, _ in selector.select(_SLICE_S):
                    if key.fileobj is self._socket:
                        with contextlib.suppress(OSError):
                            peer = waiting.enter_context(self._socket.accept()[0])
                            selector.register(peer, selectors.EVENT_READ)
                        continue
                    peer = cast("socket.socket", key.fileobj)  # it has sent, or ended
                    selector.unregister(peer)
                    with contextlib.suppress(OSError):
                        rank, own = _greet(peer)
                        if rank not in missing:
                            continue
                        missing.discard(rank)
                        peers[rank] = peer
                        if own:
                            pidfds[rank] = own[0]
                        socket.send_fds(peer, [b"fd"], [fd])
            if pidfd >= 0 and not missing:
                table = {0: pidfd, **pidfds}
                for peer in peers.values():
                    with contextlib.suppress(OSError):
                        _send_table(peer, table)
        return missing, pidfds

    def close(self) -> None:
        """Close the socket, which also removes its name."""
        self._socket.close()


def receive(
    name: str, rank: int, deadline_s: float, check: Check, pidfd: int = -1
) -> tuple[int, dict[int, int]]:
    """Receive the segment's descriptor and, if `pidfd` is given, the ranks' pidfds.

    Both come from group rank 0.

    Raises:
        OSError: rank 0 has exited, runs as another user, or did not answer by `deadline_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        _connect(peer, name, deadline_s, check)
        if _uid(peer) != os.getuid():
            raise PermissionError("the process that owns the segment runs as another user")
        socket.send_fds(peer, [_GROUP_RANK.pack(rank)], [] if pidfd < 0 else [pidfd])
        _, fds = _take(peer, 2, 1, deadline_s, check)
        if not fds:
            raise ConnectionError("the peer did not send a file descriptor")
        if pidfd < 0:
            return fds[0], {}
        try:
            return fds[0], _take_table(peer, deadline_s, check)
        except BaseException:
            os.close(fds[0])
            raise


def _connect(peer: socket.socket, name: str, deadline_s: float, check: Check) -> None:
    """Connect, retrying while the socket's backlog is full."""
    while True:
        peer.settimeout(time_left_s(deadline_s))
        try:
            return peer.connect(f"\0{name}")
        except BlockingIOError:
            check()
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_RETRY_S)


def _greet(peer: socket.socket) -> tuple[int, list[int]]:
    """Return the rank that connected (-1 if unknown), and its pidfd if the rank sent one."""
    if _uid(peer) != os.getuid():
        return -1, []
    data, fds = _take(peer, _GROUP_RANK.size, 1, time.monotonic() + _STRANGER_S, lambda: None)
    if len(data) < _GROUP_RANK.size:  # it died as soon as it had connected
        for fd in fds:
            os.close(fd)
        return -1, []
    return int(_GROUP_RANK.unpack(data)[0]), fds


def _send_table(peer: socket.socket, table: Mapping[int, int]) -> None:
    ranks = sorted(table)
    peer.sendall(_GROUP_RANK.pack(len(ranks)))
    for start in range(0, len(ranks), _MAX_FDS):
        some = ranks[start : start + _MAX_FDS]
        data = b"".join(_GROUP_RANK.pack(rank) for rank in some)
        socket.send_fds(peer, [data], [table[rank] for rank in some])


def _take_table(peer: socket.socket, deadline_s: float, check: Check) -> dict[int, int]:
    table: dict[int, int] = {}
    count = int(_GROUP_RANK.unpack(_take(peer, _GROUP_RANK.size, 0, deadline_s, check)[0])[0])
    while len(table) < count:
        num = min(_MAX_FDS, count - len(table))
        data, fds = _take(peer, num * _GROUP_RANK.size, num, deadline_s, check)
        ranks = [rank for (rank,) in _GROUP_RANK.iter_unpack(data)]
        table.update(zip(ranks, fds, strict=True))
    return table


def _take(
    peer: socket.socket, num_bytes: int, num_fds: int, deadline_s: float, check: Check
) -> tuple[bytes, list[int]]:
    """Receive `num_bytes` bytes (fewer if the stream ends) and any descriptors sent with them."""
    data, fds = b"", []
    while len(data) < num_bytes:
        peer.settimeout(min(_SLICE_S, time_left_s(deadline_s)))
        try:
            more, new, _, _ = socket.recv_fds(peer, num_bytes - len(data), max(num_fds, 1))
        except TimeoutError:
            check()
            if time.monotonic() >= deadline_s:
                raise
            continue
        fds += new
        if not more:
            if num_bytes > _GROUP_RANK.size or num_fds == 0:
                raise ConnectionError("the peer closed the connection")
            break
        data += more
    return data, fds


def _uid(peer: socket.socket) -> int:
    size = _PEER_CREDENTIALS.size
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_PEER_CREDENTIALS.unpack(data)[1])
