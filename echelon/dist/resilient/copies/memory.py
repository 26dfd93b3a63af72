"""Provide anonymous shared memory that holds one copy of a rank's shards.

The memory has no name in any file system. The other ranks on the host open it when a world begins.
The memory therefore outlives the rank that writes it, and is freed after all of these ranks have
closed it or exited. Its layout is:

    token | stamp, with its own CRC | padding up to a page (4096 bytes) | content

A forked child, such as a data loader's worker, closes all inherited memory segments immediately.
Otherwise the child would keep them allocated after the parent has released them.

The stamp is erased before the content changes, and is written after the content is complete. If a
rank dies while writing a copy, the copy therefore has no stamp. The CRC of the content is checked
before a copy is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import weakref
import zlib
from dataclasses import dataclass

import torch

from echelon.dist.backends.shm.memory import anonymous_file
from echelon.dist.resilient.copies.choice import Version
from echelon.dist.resilient.copies.filling import crc_of

_TOKEN_BYTES = 16
_STAMP = struct.Struct("<qqqqI")  # epoch, step, owner, num_bytes, CRC of the content
_CRC = struct.Struct("<I")
_NONE = b"\0" * (_STAMP.size + _CRC.size)
_START = 4096  # of the content
_open: weakref.WeakSet[CopyMemory] = weakref.WeakSet()  # in this process


@dataclass(frozen=True, slots=True)
class Stamp:
    """The description of a complete copy.

    Attributes:
        version: the version of the state that was copied.
        owner: the rank whose shards the copy contains.
        num_bytes: the size of the content.
        crc: the CRC-32 of the content.
    """

    version: Version
    owner: int
    num_bytes: int
    crc: int

    def pack(self) -> bytes:
        """Return the packed stamp, including its own CRC."""
        version = self.version
        body = _STAMP.pack(version.epoch, version.step, self.owner, self.num_bytes, self.crc)
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def num_bytes_packed() -> int:
        """Return the size of a packed stamp, in bytes."""
        return len(_NONE)

    @classmethod
    def unpack(cls, data: bytes) -> Stamp | None:
        """Return the stamp that `pack` encoded, or None if the bytes are not a valid stamp."""
        body, crc = data[: _STAMP.size], data[_STAMP.size :]
        if data == _NONE or len(data) != len(_NONE) or _CRC.pack(zlib.crc32(body)) != crc:
            return None
        epoch, step, owner, num_bytes, content = _STAMP.unpack(body)
        return cls(Version(step, epoch), owner, num_bytes, content)


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which another process on this host can open a memory segment."""

    pid: int
    fd: int
    token: str


class CopyMemory:
    """A handle to a shared memory segment, held by the segment's creator or by another process.

    Args:
        fd: the segment's descriptor, which `close` closes.
        token: the random bytes that identify the segment.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        self._fd = fd
        self._token = token
        self._map: mmap.mmap | None = None
        _open.add(self)

    @classmethod
    def create(cls) -> CopyMemory:
        """Create an empty memory segment.

        Raises:
            CollectiveError: memfd_create is not permitted, and /dev/shm is too full.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        fd = anonymous_file(_START)
        os.pwrite(fd, token, 0)
        return cls(fd, token)

    @classmethod
    def open(cls, address: Address) -> CopyMemory:
        """Open another process's memory segment.

        Raises:
            FileNotFoundError: the process has ended, or has closed the segment.
            ProcessLookupError: the PID or the descriptor now refers to something else.
            OSError: the system denies access.
        """
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        token = os.pread(fd, _TOKEN_BYTES, 0)
        if token.hex() != address.token:  # the pid or the descriptor belongs to another one by now
            os.close(fd)
            raise ProcessLookupError(f"process {address.pid} has released its shared memory")
        return cls(fd, token)

    @property
    def address(self) -> Address:
        """The address that other processes need to open this memory."""
        return Address(os.getpid(), self._fd, self._token.hex())

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of the complete copy in this memory; None if the memory has no valid stamp."""
        return Stamp.unpack(os.pread(self._fd, len(_NONE), _TOKEN_BYTES))

    @property
    def num_bytes(self) -> int:
        """The size of the memory, in bytes."""
        return os.fstat(self._fd).st_size

    def erase(self) -> None:
        """Erase the stamp. Call this before changing the content."""
        os.pwrite(self._fd, _NONE, _TOKEN_BYTES)

    def content(self, num_bytes: int) -> torch.Tensor:
        """Return a view of the content, uint8 [num_bytes]; grow the memory if necessary.

        Raises:
            OSError: the host has no memory left.
        """
        size = _START + num_bytes
        if os.fstat(self._fd).st_size < size:
            os.posix_fallocate(self._fd, 0, size)
        if self._map is None or len(self._map) < size:
            self._unmap()
            self._map = mmap.mmap(self._fd, size)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=_START)

    def commit(self, stamp: Stamp) -> None:
        """Write the stamp, which marks the content as complete."""
        os.pwrite(self._fd, stamp.pack(), _TOKEN_BYTES)

    def is_intact(self) -> bool:
        """Return whether the memory holds a complete copy whose CRC is correct."""
        stamp = self.stamp
        if stamp is None or os.fstat(self._fd).st_size < _START + stamp.num_bytes:
            return False
        return crc_of(self.content(stamp.num_bytes)) == stamp.crc

    def close(self) -> None:
        """Unmap the memory and close its descriptor in this process. Idempotent."""
        self._unmap()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _unmap(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a tensor still views it: unmapped with that
                self._map.close()
            self._map = None


def _close_all() -> None:
    for memory in list(_open):
        memory.close()


os.register_at_fork(after_in_child=_close_all)
