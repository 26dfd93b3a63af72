"""Provide all file-system operations that a save uses to create, rename or remove files.

Because all saves use this module, a test can make any of these operations fail.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class NewFile:
    """A newly created file.

    Call `sync` before `close` to ensure that the file survives a power failure.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _NEW, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Block until the file's content is on disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Calling this twice is safe."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def write_whole(path: Path, data: bytes, *, sync: bool) -> None:
    """Create a file at `path` atomically.

    Args:
        path: the path of the file.
        data: the content of the file.
        sync: whether to flush the file to disk.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    file = NewFile(unfinished)
    try:
        file.write(data)
        if sync:
            file.sync()
    finally:
        file.close()
    unfinished.rename(path)


def make_folder(path: Path) -> None:
    """Create a folder and any missing parents, unless the folder already exists."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a folder and flush the change to disk."""
    path.rename(target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Block until the folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(paths: Iterable[Path]) -> None:
    """Remove files, ignoring files that do not exist."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Hide a folder from writers by renaming it, then remove the folder and its files.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the folder cannot be renamed. In this case, nothing is removed.
    """
    trash = set_aside(path)
    with contextlib.suppress(OSError):  # the next save tries again
        empty_folder(trash)


def set_aside(path: Path) -> Path:
    """Hide a folder by renaming it, and return the new path.

    The next save removes the hidden folder.

    Raises:
        FileNotFoundError: the folder does not exist.
        OSError: the folder cannot be renamed.
    """
    name = path.name.removeprefix(".").removesuffix(".tmp").partition("-")[0]
    trash = path.with_name(f".{name}-{secrets.token_hex(8)}.trash")
    path.rename(trash)
    return trash


def empty_folder(path: Path) -> None:
    """Remove a folder's files, then the folder itself."""
    remove(list(path.iterdir()))
    path.rmdir()
