"""Create a folder exactly once, even if many processes request it at the same time.

A file lock determines which process creates the folder. The kernel releases the lock when that
process exits, even after a crash. The folder is created under a hidden name and then renamed, so a
folder that has its final name is complete.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4


def make_once(folder: Path, make: Callable[[Path], None]) -> bool:
    """Create a folder by calling `make`, unless the folder exists.

    The call blocks while another process is creating the folder.

    Args:
        folder: the folder to create; missing parents are created too.
        make: a function that is called with an empty folder and fills it. The call can take
            arbitrarily long.

    Returns:
        True if this call created the folder.

    Raises:
        OSError: the folder cannot be created.
        Exception: any exception from `make`. In that case, the folder does not exist, and the next
            waiting process tries to create it.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")) as is_locked:
        if folder.exists():
            return False
        if is_locked:  # otherwise they may belong to a process that is still writing
            _remove_leftovers(folder)
        return _make(folder, make)


def _make(folder: Path, make: Callable[[Path], None]) -> bool:
    hidden = folder.with_name(f".{folder.name}.{uuid4().hex[:16]}.tmp")
    hidden.mkdir()
    try:
        make(hidden)
        hidden.rename(folder)
    except OSError:
        if folder.exists():  # created by another process, where the file system has no locks
            return False
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return True


def _remove_leftovers(folder: Path) -> None:
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on a file; yield True, or False if locks are not supported."""
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX)
            except OSError:  # a network file system without locks
                yield False
                return
            if not _is_open_at(number, path):
                continue  # its last holder removed it: lock the file that has the name now
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(number)


def _is_open_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False
