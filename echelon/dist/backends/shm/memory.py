"""Map a group's shared memory. Each rank writes a mark into the memory, for the others to check.

[Note: who owns a shared segment] The segment is an anonymous file (memfd) with no name in any file
system. It exists only while some process maps it, so a process that dies leaves nothing behind.
Group rank 0 creates the segment and passes its descriptor to the other members over a Unix socket
with a random abstract name (handover.py). The descriptor is closed as soon as the memory is mapped.
(Python before 3.13 keeps a duplicate open.) The segment's layout is:

    one mark of 32 bytes per rank, padded to a page boundary | the engine's region
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile

from echelon.errors import CollectiveError

MARK_BYTES = 32
_PAGE_BYTES = 4096
_FILES = "/dev/shm"  # noqa: S108 -- where memfd is denied


class SharedMemory:
    """This process's mapping of the memory that `size` ranks share.

    Attributes:
        offset: the offset of the engine's region within the mapping, in bytes.
        map: the mapping.
    """

    def __init__(self, fd: int, size: int, engine_bytes: int) -> None:
        self.size = size
        self.offset = marks_bytes(size)
        # Before Python 3.13 a mapping keeps a duplicate of its descriptor: one per group.
        options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self.map = mmap.mmap(fd, self.offset + engine_bytes, **options)

    def write_mark(self, rank: int, mark: bytes) -> None:
        """Write a rank's mark, so that other ranks can verify that they share this memory."""
        self.map[rank * MARK_BYTES : (rank + 1) * MARK_BYTES] = mark

    def read_mark(self, rank: int) -> bytes:
        """Return the mark that rank `rank` wrote to the shared memory."""
        return self.map[rank * MARK_BYTES : (rank + 1) * MARK_BYTES]

    def close(self) -> None:
        """Unmap the shared memory, which is freed when all ranks have unmapped it."""
        with contextlib.suppress(BufferError):  # a view lives on: unmapped with it
            self.map.close()


def marks_bytes(size: int) -> int:
    """Return the size, in bytes, of a region with a mark per rank, rounded up to whole pages."""
    return -(-size * MARK_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def anonymous_file(num_bytes: int) -> int:
    """Create anonymous memory of a fixed size; return its descriptor.

    Raises:
        CollectiveError: memfd_create is not permitted, and /dev/shm (or, if it does not exist, the
            folder for temporary files) is full.
    """
    try:
        fd = os.memfd_create("echelon-shm", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # denied by a sandbox, or not Linux: an unlinked file
        return _unlinked_file(num_bytes)
    os.ftruncate(fd, num_bytes)
    return fd


def _unlinked_file(num_bytes: int) -> int:
    """Create an unlinked file of `num_bytes` bytes, in /dev/shm if that exists; allocate it."""
    has_shm = os.path.isdir(_FILES)  # noqa: PTH112
    where = _FILES if has_shm else tempfile.gettempdir()
    advice = "enlarge /dev/shm (docker run --shm-size)" if has_shm else "free space there"
    with tempfile.TemporaryFile(dir=where) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as err:
            raise CollectiveError(
                f"cannot allocate {num_bytes / 1e6:.1f} MB of shared memory in {where} for a "
                f"group: {err.strerror}. memfd_create is not permitted here, so {advice}",
                operation="init",
            ) from err
        return os.dup(file.fileno())
