"""The memory that the ranks of a group share, and what lies where in it.

    per rank: control block (one page) ... | per rank: two data slots

[Note: who owns a shared segment] The segment is an anonymous file (memfd) with no name in any file
system: it lives as long as somebody maps it, so no death leaves anything behind. Group rank 0 makes
it and hands the descriptor to the others over a Unix socket with a random abstract name; both ends
check that the peer runs under the same user.

A control block holds
    0     u32  published: how often this rank has announced a phase; others sleep on it
    4     u32  failed: 1 once the rank has given the group up
    8     u32  number of ranks it blames, then up to 64 of them as i32
    1024  two headers of 1024 bytes, for even and odd sequence numbers: what the rank called
    3072  32 bytes: the rank's nonce, by which the others know that they map the same memory
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import tempfile
import time

import numpy as np
import numpy.typing as npt

from echelon.dist.arrays import Flat

CONTROL_BYTES = 4096
HEADER_BYTES = 1024
_HEADERS_OFFSET = 1024
_NONCE_OFFSET = 3072
_BLAMED_OFFSET = 8
_MAX_BLAMED = 64
_PEER_CREDENTIALS = struct.Struct("3i")
_GROUP_RANK = struct.Struct("<I")
NONCE_BYTES = 32


class Segment:
    """One mapping of the shared memory of `size` ranks with data slots of `slot_bytes`."""

    def __init__(self, fd: int, size: int, slot_bytes: int) -> None:
        self.size = size
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, segment_bytes(size, slot_bytes))
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._view = memoryview(self._map)
        self.words = self._view[: size * CONTROL_BYTES].cast("I")
        self._address = self._bytes.ctypes.data

    def address(self, rank: int) -> int:
        """Return where `published` of a rank lies in this process."""
        return self._address + rank * CONTROL_BYTES

    def slot(self, rank: int, parity: int) -> npt.NDArray[np.uint8]:
        """Return one of the two data slots of a rank: [slot_bytes] of uint8."""
        start = self.size * CONTROL_BYTES + (2 * rank + parity) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def typed(self, rank: int, parity: int, like: Flat, count: int) -> Flat:
        """Return the first `count` items of a slot in the dtype of `like`."""
        return self.slot(rank, parity)[: count * like.itemsize].view(like.dtype)

    def write_header(self, rank: int, parity: int, data: bytes) -> None:
        """Say what this rank calls; cut to what fits."""
        start = rank * CONTROL_BYTES + _HEADERS_OFFSET + parity * HEADER_BYTES
        data = data[: HEADER_BYTES - 2]
        self._map[start : start + 2 + len(data)] = len(data).to_bytes(2, "little") + data

    def read_header(self, rank: int, parity: int) -> bytes:
        """Return what a rank says it calls."""
        start = rank * CONTROL_BYTES + _HEADERS_OFFSET + parity * HEADER_BYTES
        length = min(int.from_bytes(self._map[start : start + 2], "little"), HEADER_BYTES - 2)
        return self._map[start + 2 : start + 2 + length]

    def write_nonce(self, rank: int, nonce: bytes) -> None:
        """Leave the mark by which the others recognise this memory."""
        start = rank * CONTROL_BYTES + _NONCE_OFFSET
        self._map[start : start + NONCE_BYTES] = nonce

    def read_nonce(self, rank: int) -> bytes:
        """Return the mark that a rank left."""
        start = rank * CONTROL_BYTES + _NONCE_OFFSET
        return self._map[start : start + NONCE_BYTES]

    def blame(self, rank: int, blamed: list[int]) -> None:
        """Say that `rank` gives the group up because of the group ranks `blamed`."""
        base = rank * CONTROL_BYTES // 4
        blamed = blamed[:_MAX_BLAMED]
        for place, culprit in enumerate(blamed):
            self.words[base + _BLAMED_OFFSET // 4 + 1 + place] = culprit
        self.words[base + _BLAMED_OFFSET // 4] = len(blamed)
        self.words[base + 1] = 1

    def blamed_by(self, rank: int) -> list[int] | None:
        """Return whom a rank blames, None if it has not given up."""
        base = rank * CONTROL_BYTES // 4
        if not self.words[base + 1]:
            return None
        count = min(self.words[base + _BLAMED_OFFSET // 4], _MAX_BLAMED)
        first = base + _BLAMED_OFFSET // 4 + 1
        return [r for r in self.words[first : first + count].tolist() if r < self.size]

    def close(self) -> None:
        """Unmap. The memory itself goes with its last mapping."""
        self.words.release()
        self._view.release()
        del self._bytes
        with contextlib.suppress(BufferError):  # a view of the user's lives on: freed with it
            self._map.close()


def segment_bytes(size: int, slot_bytes: int) -> int:
    """Return the size of the whole segment."""
    return size * (CONTROL_BYTES + 2 * slot_bytes)


def anonymous_file(num_bytes: int) -> int:
    """Return the descriptor of memory without a name, of fixed size."""
    try:
        fd = os.memfd_create("echelon-shm", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # denied by a sandbox, or not Linux: an unlinked file
        where = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108
        with tempfile.TemporaryFile(dir=where) as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


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
