"""Arrange data that several ranks need into contiguous byte sequences called lines.

Each line contains the tensors that one set of ranks needs. If the tensors are replicas of a whole
model, the set contains all ranks. If they are replicas of a shard, the set contains only the ranks
that hold this shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from echelon.dist.checkpoint.disk.source import Source
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.ranks.peers import Peers
from echelon.dist.checkpoint.state.held import Held

ALIGNMENT = 16  # bytes; a multiple of the size of every dtype
_KEY_BYTES = 8
Wanted = tuple[Held, str]
Ranks = tuple[int, ...]


class Piece(NamedTuple):
    """The part of a tensor that occupies the bytes [first, last) of a `Line`."""

    held: Held
    path: str
    dtype: torch.dtype
    begin: int  # of the tensor, on the line
    first: int
    last: int

    def elements(self) -> tuple[int, int]:
        """Return the piece's offset within `held` and the piece's length, both in elements."""
        size = self.dtype.itemsize
        return (self.first - self.begin) // size, (self.last - self.first) // size


class Line:
    """A sequence of bytes (the line) that holds the tensors that all ranks of a set need.

    The layout of the line is the same on all of these ranks.

    Attributes:
        ranks: the ranks of the set, in ascending order.
        items: for each tensor, in the order of the line, the `Held` that this rank fills and the
            tensor's path.
        num_bytes: the length of the line in bytes, with each tensor padded to `ALIGNMENT`.
    """

    def __init__(self, ranks: Ranks, items: Sequence[Wanted], source: Source) -> None:
        self.ranks = ranks
        self.items = list(items)
        self.num_bytes = 0
        self._dtypes: list[torch.dtype] = []
        self._begins: list[int] = []
        for held, path in items:
            dtype = _stored_dtype(source, path)
            self._dtypes.append(dtype)
            self._begins.append(self.num_bytes)
            self.num_bytes += aligned(held.length * dtype.itemsize)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """Yield the pieces that occupy the bytes [first, last) of this line."""
        for (held, path), dtype, begin in zip(self.items, self._dtypes, self._begins, strict=True):
            if begin >= last:
                return
            end = begin + held.length * dtype.itemsize
            if end > first:
                yield Piece(held, path, dtype, begin, max(begin, first), min(end, last))


class Lines(NamedTuple):
    """The lines that one rank belongs to.

    Attributes:
        for_all: the line of all ranks, or None.
        for_some: the lines of smaller sets of ranks, sorted by their ranks.
        has_some: True if any line of the job belongs to at least two ranks but not to all ranks.
    """

    for_all: Line | None
    for_some: list[Line]
    has_some: bool


def find_lines(peers: Peers, source: Source, wanted: Sequence[Wanted]) -> Lines:
    """Return the `Line`s with tensors that both this rank and other ranks need. Collective.

    The ranks exchange at most 8 bytes per tensor.
    """
    own = {_key(source, held, path): (held, path) for held, path in reversed(wanted)}
    own.pop(b"", None)
    sets = _ranks_by_key(peers, b"".join(sorted(own)))
    by_ranks: dict[Ranks, list[Wanted]] = {}
    for key in sorted(own):
        by_ranks.setdefault(sets[key], []).append(own[key])
    lines = [Line(ranks, by_ranks[ranks], source) for ranks in sorted(by_ranks) if len(ranks) > 1]
    return Lines(
        for_all=next((line for line in lines if len(line.ranks) == peers.size), None),
        for_some=[line for line in lines if len(line.ranks) < peers.size],
        has_some=any(1 < len(ranks) < peers.size for ranks in sets.values()),
    )


def _ranks_by_key(peers: Peers, keys: bytes) -> Mapping[bytes, Ranks]:
    """Map each key to the ranks that want the elements it identifies. Collective."""
    digests = peers.all_gather(hashlib.blake2b(keys, digest_size=16).digest())
    if len(set(digests)) == 1:
        return dict.fromkeys(_split(keys), tuple(range(peers.size)))
    is_first = digests.index(digests[peers.rank]) == peers.rank
    tables = peers.all_gather(keys if is_first else b"")
    alike: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        alike.setdefault(digest, []).append(rank)
    found: dict[bytes, list[int]] = {}
    for ranks in alike.values():
        for key in _split(tables[ranks[0]]):
            found.setdefault(key, []).extend(ranks)
    known = {tuple(ranks): tuple(sorted(ranks)) for ranks in found.values()}
    return {key: known[tuple(ranks)] for key, ranks in found.items()}


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES))


def _key(source: Source, held: Held, path: str) -> bytes:
    """Return a key that identifies the elements to fill, or b"" if no `Line` can contain them."""
    if held.repeats or not held.length or not held.data.is_contiguous() or held.data.is_conj():
        return b""
    name = source.manifest.aliases.get(path, path)
    text = f"{name} {held.start} {held.length}"
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()


def _stored_dtype(source: Source, path: str) -> torch.dtype:
    stored = source.manifest.tensor(path)
    assert stored is not None, path
    return dtype_named(stored.dtype)


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
