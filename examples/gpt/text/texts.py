"""Read text from files, one after another, in blocks.

By default, the text is the source of the running Python's standard library, which every machine
has; otherwise, it is one of the user's files. Every 16th block is held out for validation.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 64 * 1024
VALIDATION_EVERY = 16  # one block in 16 is held out
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """Files that are read as one text.

    Attributes:
        name: the text's name in messages.
        files: the files, each with its size in bytes and its modification time.
        limit_bytes: the maximum number of bytes to read; None: all.
    """

    name: str
    files: tuple[tuple[Path, int, int], ...]
    limit_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the text in bytes."""
        size = sum(size for _, size, _ in self.files)
        return size if self.limit_bytes is None else min(size, self.limit_bytes)

    @property
    def stamp(self) -> int:
        """A number that changes when a file changes."""
        files = [(str(path), *rest) for path, *rest in self.files]
        return zlib.crc32(repr((files, self.limit_bytes)).encode())

    def pieces(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yield pieces: the block's number, the bytes, and whether they start a file.

        A piece lies within one block and one file.

        Raises:
            OSError: a file cannot be read.
        """
        block_bytes = self.block_bytes
        position, end = 0, self.num_bytes
        for path, _, _ in self.files:
            if position == end:
                return
            begins = True
            with path.open("rb") as file:
                while piece := file.read(min(block_bytes - position % block_bytes, end - position)):
                    yield position // block_bytes, piece, begins
                    position += len(piece)
                    begins = False

    @property
    def block_bytes(self) -> int:
        """The size of a block; a short text has shorter blocks."""
        return max(1, min(BLOCK_BYTES, self.num_bytes // VALIDATION_EVERY))


def is_held_out(block: int) -> bool:
    """Return whether a block is held out for validation."""
    return block % VALIDATION_EVERY == VALIDATION_EVERY - 1


def text_of(path: Path) -> Text:
    """Return the text of one file.

    Raises:
        OSError: the file does not exist.
    """
    return Text(str(path), (_stamped(path.resolve()),))


def standard_library(folder: Path | None = None, *, limit_bytes: int | None = None) -> Text:
    """Return the source text of the standard library's own modules, in a fixed order."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = tuple(_stamped(path) for path in walk(folder))
    return Text("the standard library", files, limit_bytes)


def walk(folder: Path) -> Iterator[Path]:
    """Yield a folder's Python files in a fixed order, without installed packages."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - NOT_THE_LIBRARY)
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def _stamped(path: Path) -> tuple[Path, int, int]:
    status = path.stat()
    return path, status.st_size, status.st_mtime_ns
