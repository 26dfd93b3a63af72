"""Read a folder of token shards through memory maps, which load data only when it is accessed."""

from __future__ import annotations

import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.errors import TokenShardsError
from echelon.tokens.index import Index, read_index

_PIECE_BYTES = 1 << 24  # read at once during verification


class TokenShards:
    """The tokens of a folder as one sequence, with the positions at which its documents end.

    Opening the folder reads the index and checks the files' sizes; `verify` checks every byte.
    Several threads can read at the same time.

    Args:
        folder: a folder that `echelon prepare` or a `ShardWriter` created.

    Raises:
        TokenShardsError: the folder is not a folder of token shards, or one of its files is missing
            or has a different size.

    Example:
        >>> shards = TokenShards("web")
        >>> shards.verify()  # every byte
        >>> shards.read(first=0, num_tokens=4).dtype
        dtype('int64')
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.index: Index = read_index(self.folder)
        sizes = [shard.num_tokens for shard in self.index.shards]
        self._firsts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])  # [num_shards + 1]

    def __len__(self) -> int:
        return self.index.num_tokens

    def __repr__(self) -> str:
        return f"TokenShards({str(self.folder)!r}: {len(self):,} tokens)"

    def read(self, first: int, num_tokens: int) -> NDArray[np.int64]:
        """Return `num_tokens` tokens, starting at token number `first`: int64 [num_tokens].

        Raises:
            ValueError: the range extends beyond the folder's tokens.
            TokenShardsError: a file cannot be mapped, or contains a token that is not in the
                vocabulary.
        """
        if first < 0 or num_tokens < 0 or first + num_tokens > len(self):
            raise ValueError(
                f"there are only {len(self)} tokens, but tokens {first} to "
                f"{first + num_tokens} were requested"
            )
        out = np.empty(num_tokens, np.int64)
        done = 0
        number = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while done < num_tokens:
            start = first + done - int(self._firsts[number])
            piece = self._tokens[number][start : start + num_tokens - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            number += 1
        if num_tokens and int(out.max()) >= self.index.vocabulary_size:
            raise TokenShardsError(
                f"{self.folder}: token {int(out.max())} near position {first} is outside the "
                f"vocabulary of {self.index.vocabulary_size} tokens: a file is damaged",
                path=self.folder,
            )
        return out

    def documents(self, first: int, num_tokens: int) -> NDArray[np.int64]:
        """Return the number of each token's document; token `first` is in document 0.

        Returns:
            int64 [num_tokens].
        """
        ends = self._ends_between(first, first + num_tokens)
        numbers = np.zeros(num_tokens, np.int64)
        numbers[ends - first] = 1  # distinct: no document is empty
        return np.cumsum(numbers)

    def ends(self) -> NDArray[np.int64]:
        """Return the end position of each document, in ascending order: int64 [num_documents].

        Raises:
            TokenShardsError: a file of document ends is damaged.
        """
        ends = np.concatenate([np.empty(0, np.int64), *self._ends])
        if len(ends) and (ends[0] < 1 or ends[-1] > len(self) or (np.diff(ends) < 1).any()):
            raise TokenShardsError(
                f"{self.folder}: a file is damaged: the end offsets of documents must be in "
                f"ascending order, between 1 and {len(self)}",
                path=self.folder,
            )
        return ends

    def verify(self) -> None:
        """Read every byte of the files, and compare their checksums with those in the index.

        Raises:
            TokenShardsError: a file does not match the index; the error message names the file.
        """
        for shard in self.index.shards:
            for name, expected in (
                (shard.tokens_name, shard.tokens_crc32),
                (shard.documents_name, shard.documents_crc32),
            ):
                path = self.folder / name
                if _crc32_of(path) != expected:
                    raise TokenShardsError(
                        f"{path}: the file is damaged (the checksum does not match)", path=path
                    )

    def _ends_between(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the positions after `first` and before `end` at which a new document begins."""
        found = [np.empty(0, np.int64)]
        number = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while number < len(self.index.shards) and self._firsts[number] < end:
            ends = self._ends[number]  # a document's end is listed with its last token
            low = np.searchsorted(ends, first, side="right")
            found.append(ends[low : np.searchsorted(ends, end)])
            number += 1
        return np.concatenate(found)

    @cached_property
    def _tokens(self) -> list[NDArray[Any]]:
        dtype = np.dtype(self.index.dtype).newbyteorder("<")
        return [
            self._map(shard.tokens_name, dtype, shard.num_tokens) for shard in self.index.shards
        ]

    @cached_property
    def _ends(self) -> list[NDArray[Any]]:
        dtype = np.dtype("<i8")
        return [
            self._map(shard.documents_name, dtype, shard.num_documents)
            for shard in self.index.shards
        ]

    def _map(self, name: str, dtype: np.dtype[Any], num_items: int) -> NDArray[Any]:
        if not num_items:
            return np.empty(0, dtype)  # an empty file cannot be mapped
        path = self.folder / name
        try:
            return np.memmap(path, dtype, mode="r", shape=(num_items,))
        except (OSError, ValueError) as error:
            raise TokenShardsError(f"cannot map {path}: {error}", path=path) from error


def _crc32_of(path: Path) -> int:
    total = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                total = zlib.crc32(piece, total)
    except OSError as error:
        raise TokenShardsError(f"cannot read {path}: {error.strerror}", path=path) from error
    return total
