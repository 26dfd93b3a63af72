"""Define the sources from which tensors are loaded."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk import in_use
from echelon.dist.checkpoint.disk.folder import COMMIT, newest, read_manifest
from echelon.dist.checkpoint.disk.manifest import Manifest, StoredFile, dtype_bytes
from echelon.dist.checkpoint.disk.pattern import Pattern, Repeats
from echelon.dist.checkpoint.disk.rank_file import RankFileReader
from echelon.dist.checkpoint.disk.tensor_bytes import as_bytes, dtype_named, is_plain
from echelon.dist.checkpoint.state.held import Held

_MAX_OPEN = 64


class Source(Protocol):
    """A source of tensors and values, keyed by path.

    Attributes:
        path: the path to show in error messages.
        manifest: the description of the contents.
    """

    path: Path
    manifest: Manifest

    def read(self, path: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        """Fill `out` with elements of a tensor, from element `start` onward.

        `out` is a 1-D tensor of the stored dtype. If `repeats` is given (see `Pattern`), `out`
        receives several ranges, one after another.
        """
        ...

    def close(self) -> None:
        """Release the resources used for reading. Safe to call twice."""
        ...


class Version:
    """A complete version of a checkpoint.

    Raises:
        CheckpointError: no version exists at `path`, or the version is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = newest(path)
        self._readers: OrderedDict[int, RankFileReader] = OrderedDict()
        self._mark = in_use.hold(self.path / COMMIT)
        try:
            self.manifest = read_manifest(self.path)
        except BaseException:
            self.close()
            raise

    def read(self, path: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        """Fill `out` from the stored ranges that contain the requested elements.

        Raises:
            CheckpointError: a file is missing, truncated or damaged.
        """
        stored = self.manifest.tensor(path)
        assert stored is not None, path
        target = as_bytes(out)
        size = dtype_bytes(stored.dtype)
        num_runs = math.prod(count for count, _ in repeats)
        wanted = Pattern(start, out.numel() // num_runs, repeats)
        num_read = 0
        for one in stored.ranges:
            pattern = one.pattern
            if pattern.stop <= wanted.start or wanted.stop <= pattern.start:
                continue
            for place, place_there, length in wanted.common(pattern).tolist():
                piece = target[place * size : (place + length) * size]
                self._reader(one.file).read_into(one.offset + place_there * size, piece)
                num_read += length
        assert num_read == out.numel(), (path, start, out.numel())

    def verify(self) -> int:
        """Read every byte and verify the checksums; return the number of bytes read.

        Raises:
            CheckpointError: a file is missing, truncated or damaged.
        """
        for number in self.manifest.files:
            self._reader(number).verify()
        return sum(file.num_bytes for file in self.manifest.files.values())

    def close(self) -> None:
        """Close the files of this version."""
        while self._readers:
            self._readers.popitem()[1].close()
        mark, self._mark = self._mark, -1
        if mark >= 0:
            in_use.release(mark)

    def _open(self, stored: StoredFile) -> RankFileReader:
        return RankFileReader(self.path, stored)

    def _reader(self, number: int) -> RankFileReader:
        reader = self._readers.pop(number, None)
        if reader is None:
            reader = self._open(self.manifest.files[number])
        self._readers[number] = reader  # the last is the one used last
        if len(self._readers) > _MAX_OPEN:
            self._readers.popitem(last=False)[1].close()
        return reader


def runs(start: int, out: Tensor, repeats: Repeats) -> Iterator[tuple[int, Tensor]]:
    """Yield the start of each range, and the slice of `out` that receives its elements."""
    num_runs = math.prod(count for count, _ in repeats)
    pattern = Pattern(start, out.numel() // num_runs, repeats)
    for index, first in enumerate(pattern.starts().tolist()):
        yield first, out[index * pattern.length : (index + 1) * pattern.length]


def fill(source: Source, held: Held, path: str) -> None:
    """Fill `held` from the tensor stored under `path`, converting the dtype if necessary.

    Raises:
        CheckpointError: the tensor cannot be read.
    """
    stored = source.manifest.tensor(path)
    assert stored is not None, path
    data = held.data
    if stored.dtype == held.dtype and is_plain(data):
        source.read(path, held.start, data.reshape(-1), held.repeats)
        return
    read = torch.empty(held.length, dtype=dtype_named(stored.dtype))
    source.read(path, held.start, read, held.repeats)
    with torch.no_grad():
        data.copy_(read.reshape(data.shape))


def check_fit(source: Source, held: Held, path: str) -> str | None:
    """Return why the tensor under `path` cannot be loaded into `held`, or None if it can be."""
    stored = source.manifest.tensor(path)
    if stored is None:
        return f"{path} is not in the checkpoint"
    if stored.shape != held.shape:
        return (
            f"{path} has shape {list(stored.shape)} in the checkpoint, but {list(held.shape)} here"
        )
    if stored.dtype != held.dtype and not _converts(stored.dtype, held.data.dtype):
        return f"{path} is {stored.dtype} in the checkpoint, but {held.dtype} here"
    return None


def _converts(stored: str, wanted: torch.dtype) -> bool:
    return dtype_named(stored).is_floating_point and wanted.is_floating_point


def require(problems: list[str], path: Path) -> None:
    """Raise an error if any problems were found.

    Raises:
        ValueError: `problems` is not empty. The error lists the first three problems.
    """
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{path}: {'; '.join(problems[:3])}{more}")
