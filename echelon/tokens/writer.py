"""Write a folder of token shards, which appears under its final name only when it is complete."""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from echelon.errors import TokenShardsError
from echelon.tokens.index import DTYPES, NAME, Index, ShardEntry

if TYPE_CHECKING:
    from typing_extensions import Self

SHARD_TOKENS = 100_000_000  # 200 MB of uint16: few files, none too large to copy


class _OpenFile:
    """A file that is being written, with its number of items and checksum so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.crc32 = 0
        self.num_items = 0
        self._file: BinaryIO = path.open("wb")

    def write(self, items: NDArray[Any]) -> None:
        data = items.tobytes()
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.num_items += len(items)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the file without syncing it, because the folder is about to be removed."""
        try:
            self._file.close()
        except OSError:  # a full disk refuses the last buffer once more
            self._file.raw.close() if hasattr(self._file, "raw") else None


class ShardWriter:
    """A writer that creates a folder of token shards, adding one document at a time.

    Use the writer in a `with` block. The complete folder appears under its final name when the
    block ends. If the block raises an exception, no folder is created. Not thread-safe.

    Args:
        folder: the folder to create. The folder must not exist, but its parent must.
        vocabulary_size: the size of the vocabulary; every token must be less than this number. The
            size determines whether tokens are stored as uint8, uint16 or uint32.
        tokenizer: the tokenizer's name, which is stored in the index for readers.
        end_of_document: the token to write after each document; with None, no token is written.
        shard_tokens: the number of tokens per shard; the last shard can have fewer.

    Raises:
        ValueError: the folder exists, its parent does not, or a size is invalid.

    Example:
        >>> with ShardWriter(Path("tales"), vocabulary_size=257, end_of_document=256) as writer:
        ...     for text in ("Once upon a time", "The end"):
        ...         writer.add(list(text.encode()))
        ...         writer.end_document()
        >>> TokenShards("tales")
        TokenShards('tales': 25 tokens)
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocabulary_size: int,
        tokenizer: str = "",
        end_of_document: int | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        folder = Path(folder)
        if folder.exists():
            raise ValueError(f"{folder} already exists: remove it, or choose another folder")
        if not folder.parent.is_dir():
            raise ValueError(f"cannot write {folder}: {folder.parent} is not a folder")
        if not 1 <= vocabulary_size <= 1 << 32:
            raise ValueError(f"vocabulary_size must be from 1 to 2**32, got {vocabulary_size}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
        if end_of_document is not None and not 0 <= end_of_document < vocabulary_size:
            raise ValueError(
                f"end_of_document must be at least 0 and below vocabulary_size "
                f"({vocabulary_size}), got {end_of_document}"
            )
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._end_of_document = end_of_document
        self._shard_tokens = shard_tokens
        self._dtype = next(d for d, size in DTYPES.items() if vocabulary_size <= 1 << 8 * size)
        self._shards: list[ShardEntry] = []
        self._num_tokens = 0
        self._document_tokens = 0  # of the document being added
        self._open: tuple[_OpenFile, _OpenFile] | None = None
        self._hidden = folder.with_name(f".{folder.name}-{uuid4().hex[:16]}.tmp")
        self._hidden.mkdir()

    @property
    def num_tokens(self) -> int:
        """The number of tokens written so far, including end-of-document tokens."""
        return self._num_tokens

    @property
    def num_documents(self) -> int:
        """The number of documents written so far, excluding the current one."""
        open_ones = self._open[1].num_items if self._open else 0
        return sum(shard.num_documents for shard in self._shards) + open_ones

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens to the current document.

        Raises:
            ValueError: `tokens` is not a one-dimensional sequence of integers, or a token is
                outside the vocabulary.
            OSError: writing failed, for example because the disk is full.
        """
        wide = np.asarray(tokens)
        if not wide.size:
            return
        if wide.ndim != 1 or wide.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be integers of shape [N], got {wide.dtype} {list(wide.shape)}"
            )
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= self._vocabulary_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"token {wrong} is outside the vocabulary (0 to {self._vocabulary_size - 1})"
            )
        self._document_tokens += len(wide)
        self._append(wide.astype(np.dtype(self._dtype).newbyteorder("<")))

    def end_document(self) -> None:
        """End the current document; a document without tokens is dropped.

        Raises:
            OSError: writing failed, for example because the disk is full.
        """
        if not self._document_tokens:
            return
        if self._end_of_document is not None:
            self.add([self._end_of_document])
        self._document_tokens = 0
        _, documents = self._files()
        documents.write(np.array([self._num_tokens], "<i8"))

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Complete the folder, or remove it if the block raised an exception.

        Raises:
            TokenShardsError: no token was added, or another process has created the folder.
            OSError: writing failed, for example because the disk is full.
        """
        try:
            if error is None:
                self._complete()
        finally:
            if self._open:
                for file in self._open:
                    file.abandon()
            shutil.rmtree(self._hidden, ignore_errors=True)

    def _append(self, tokens: NDArray[Any]) -> None:
        while len(tokens):
            file, _ = self._files()
            room = self._shard_tokens - file.num_items
            if not room:
                self._close_shard()
                continue
            file.write(tokens[:room])
            self._num_tokens += min(room, len(tokens))
            tokens = tokens[room:]

    def _files(self) -> tuple[_OpenFile, _OpenFile]:
        if self._open is None:
            number = len(self._shards)
            tokens = _OpenFile(self._hidden / f"tokens_{number:05}.bin")
            self._open = tokens, _OpenFile(self._hidden / f"documents_{number:05}.bin")
        return self._open

    def _close_shard(self) -> None:
        assert self._open is not None
        tokens, documents = self._open
        tokens.close()
        documents.close()
        self._open = None
        self._shards.append(
            ShardEntry(
                tokens_name=tokens.path.name,
                documents_name=documents.path.name,
                num_tokens=tokens.num_items,
                num_documents=documents.num_items,
                tokens_crc32=tokens.crc32,
                documents_crc32=documents.crc32,
            )
        )

    def _complete(self) -> None:
        self.end_document()
        if self._open is not None:
            self._close_shard()
        if not self._num_tokens:
            raise TokenShardsError(
                f"there are no tokens to write into {self._folder}", path=self._folder
            )
        index = Index(
            dtype=self._dtype,
            vocabulary_size=self._vocabulary_size,
            tokenizer=self._tokenizer,
            end_of_document=self._end_of_document,
            shards=tuple(self._shards),
        )
        path = self._hidden / NAME
        with path.open("w", encoding="utf-8") as file:
            file.write(index.to_json())
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(self._hidden)
        try:
            self._hidden.rename(self._folder)
        except OSError as error:
            if not self._folder.exists():
                raise
            raise TokenShardsError(
                f"{self._folder} was created by another process while this one was writing it",
                path=self._folder,
            ) from error
        _flush_folder(self._folder.parent)


def _flush_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
