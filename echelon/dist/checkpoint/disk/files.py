"""What a save does to the file system, one call a step, and nothing around it.

Every change of a checkpoint on disk passes here, so that a test can end the process before any of
them and see that the previous checkpoint still loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class NewFile:
    """A file that did not exist before. Close it; `sync` first if it has to outlive the machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, _NEW, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Block until the disk has it."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close it. Safe to call twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def write_whole(path: Path, data: bytes, *, sync: bool) -> None:
    """Make a file appear at `path` with all its content, or not at all.

    Args:
        path: of the file.
        data: its content.
        sync: have it outlive the machine, once the folder is synced as well.
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
    """Make a folder and those above it; one that is there already is fine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_folder(path.parent)


def rename(path: Path, target: Path) -> None:
    """Give a folder another name, for good."""
    path.rename(target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Block until the disk knows the folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder of files; what is gone already is fine."""
    try:
        remove(list(path.iterdir()))
        path.rmdir()
    except FileNotFoundError:
        return
