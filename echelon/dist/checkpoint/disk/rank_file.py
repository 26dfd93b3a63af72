"""Write and read a rank's file, which has a checksum for each block."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.dist.checkpoint.disk import files
from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.dist.checkpoint.disk.manifest import BLOCK_BYTES, Range, StoredFile, StoredTensor
from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes

if TYPE_CHECKING:
    from echelon.dist.checkpoint.state.held import Held


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.bin"


class RankFileWriter:
    """A writer that appends ranges of tensors to a new file and records their locations.

    Attributes:
        tensors: the tensors that were written, keyed by path.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._rank = rank
        self._file = files.NewFile(folder / file_name(rank))
        self._num_bytes = 0
        self._crc = 0
        self._checksums: list[int] = []

    def append(self, held: Held) -> None:
        """Write one piece of a tensor. A tensor can have several pieces."""
        ranges: tuple[Range, ...] = ()
        if held.length:
            ranges = (
                Range(self._rank, self._num_bytes, held.start, held.pattern.length, held.repeats),
            )
            self._write(as_bytes(held.data))
        before = self.tensors.get(held.path)
        if before is not None:
            assert (before.shape, before.dtype) == (held.shape, held.dtype), (held.path, before)
            ranges = (*before.ranges, *ranges)
        self.tensors[held.path] = StoredTensor(held.shape, held.dtype, ranges)

    def finish(self) -> StoredFile:
        """Block until the file is on disk; return the file's description."""
        if self._num_bytes % BLOCK_BYTES:
            self._checksums.append(self._crc)
        self._file.sync()
        self._file.close()
        return StoredFile(file_name(self._rank), self._num_bytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file, even if `finish` was not called."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        while data:
            room = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            piece, data = data[:room], data[room:]
            self._file.write(piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._num_bytes += len(piece)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._checksums.append(self._crc)
                self._crc = 0


class RankFileReader:
    """A reader that verifies each block of a rank's file as it reads the block. Not thread-safe.

    Raises:
        DamagedError: the file is missing, truncated or damaged. The constructor and every method
            that reads can raise this error.
    """

    def __init__(self, folder: Any, stored: StoredFile) -> None:
        self.path = folder / stored.name  # a Path, or what has its operator
        self._stored = stored
        self._block = -1  # the number of the one that is kept
        self._content = memoryview(b"")
        self._descriptor = -1
        size = self._open()
        if size != stored.num_bytes:
            self.close()
            raise self._error(f"the file has {size} bytes, but {stored.num_bytes} were saved")

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes from the file, starting at `offset`."""
        while target:
            block, skip = divmod(offset, BLOCK_BYTES)
            length = min(len(target), self._size_of(block) - skip)
            piece, target = target[:length], target[length:]
            if length == BLOCK_BYTES:
                self._read(block, piece)  # no need to keep it: no other rank wants a part of it
            else:
                self._keep(block)
                piece[:] = self._content[skip : skip + length]
            offset += length

    def verify(self) -> None:
        """Read all blocks and verify their checksums."""
        for block in range(len(self._stored.checksums)):
            self._keep(block)

    def close(self) -> None:
        """Close the file. Calling this twice is safe."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        """Open the file; return its size."""
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise self._error(str(error.strerror)) from None
        return os.fstat(self._descriptor).st_size

    def _fetch(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file without verifying checksums."""
        rest = target
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], offset)
            except OSError as error:
                raise self._error(f"{error.strerror} at byte {offset}") from None
            if count == 0:
                raise self._error(f"the file is truncated: it ends at byte {offset}")
            offset, rest = offset + count, rest[count:]

    def _size_of(self, block: int) -> int:
        return min(BLOCK_BYTES, self._stored.num_bytes - block * BLOCK_BYTES)

    def _keep(self, block: int) -> None:
        if block == self._block:
            return
        self._block = -1
        content = memoryview(bytearray(self._size_of(block)))
        self._read(block, content)
        self._block, self._content = block, content

    def _read(self, block: int, target: memoryview) -> None:
        self._fetch(block * BLOCK_BYTES, target)
        if zlib.crc32(target) != self._stored.checksums[block]:
            first = block * BLOCK_BYTES
            raise self._error(
                f"the file is damaged between bytes {first} and {first + len(target)} (CRC-32)"
            )

    def _error(self, reason: str) -> DamagedError:
        return DamagedError(f"{self.path}: {reason}", path=str(self.path))
