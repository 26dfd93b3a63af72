"""Mark a version that is being read, so that no other process removes it.

A reader holds a shared lock (`flock`) on the commit mark, and a process that removes the version
needs an exclusive lock on it. If the file system does not support locks, nothing is marked, and a
reader whose files disappear tries another version.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from echelon.dist.checkpoint.disk.damage import DamagedError

_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def hold(mark: Path) -> int:
    """Mark a version as being read; return the file descriptor to pass to `release`.

    Raises:
        DamagedError: the version is being removed or has been removed.
    """
    try:
        descriptor = os.open(mark, os.O_RDONLY | _CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{mark}: {error.strerror}", path=mark) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DamagedError(
            f"{mark.parent}: the checkpoint is being removed", path=mark.parent
        ) from None
    except OSError:
        pass  # no such locks here
    return descriptor


def release(descriptor: int) -> None:
    """Remove the mark that `hold` set."""
    os.close(descriptor)


@contextlib.contextmanager
def alone(mark: Path) -> Iterator[bool]:
    """Lock out readers during the `with` block; yield False if the version already has a reader."""
    try:
        descriptor = _open(mark)
    except OSError:
        yield True  # there is no mark, so no reader
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _open(mark: Path) -> int:
    try:
        return os.open(mark, os.O_RDWR | _CLOEXEC)  # NFS locks alone what may be written
    except PermissionError:
        return os.open(mark, os.O_RDONLY | _CLOEXEC)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
