"""Who reads what: elements that all ranks want are read once, and passed on.

The tensors that every rank wants lie one after the other on one line of bytes. It is read in
windows: each rank reads an equal part of the window, checks it, and an all_gather gives all ranks
the whole. What only some ranks want, such as shards, each of them reads by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.manifest import dtype_bytes
from echelon.dist.checkpoint.disk.source import Source, fill
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.ranks.peers import Peers
from echelon.dist.checkpoint.state.held import Held

_WINDOW_BYTES = 64 << 20
_ALIGNMENT = 16  # bytes; a multiple of every dtype's
_KEY_BYTES = 8
Wanted = tuple[Held, str]


class _Piece(NamedTuple):
    """Some bytes of one tensor on the line: `first` to `last`, counted on the line."""

    held: Held
    path: str
    dtype: torch.dtype
    begin: int  # of the tensor, on the line
    first: int
    last: int

    def elements(self) -> tuple[int, int]:
        """Return the first element, counted in the tensor's part here, and their number."""
        size = self.dtype.itemsize
        return (self.first - self.begin) // size, (self.last - self.first) // size


def read(peers: Peers, source: Source, wanted: Sequence[Wanted]) -> Exception | None:
    """Fill all tensors. Collective; returns this rank's error, after all ranks are through."""
    shared = _shared(peers, source, wanted) if peers.size > 1 else {}
    error = _read_line(peers, source, list(shared.values())) if shared else None
    done = {id(held) for held, _ in shared.values()}
    try:
        for held, path in wanted:
            if error is None and id(held) not in done:
                fill(source, held, path)
    except Exception as raised:  # noqa: BLE001 -- all ranks raise it together
        error = raised
    return error


def _shared(peers: Peers, source: Source, wanted: Sequence[Wanted]) -> dict[bytes, Wanted]:
    """Return what every rank wants, in the same order on all ranks."""
    own = {_key(source, held, path): (held, path) for held, path in reversed(wanted)}
    own.pop(b"", None)
    keys = b"".join(sorted(own))
    digests = peers.all_gather(hashlib.blake2b(keys, digest_size=16).digest())
    common = set(own)
    if len(set(digests)) > 1:
        is_first = digests.index(digests[peers.rank]) == peers.rank
        for rank, theirs in enumerate(peers.all_gather(keys if is_first else b"")):
            if digests.index(digests[rank]) == rank:
                places = range(0, len(theirs), _KEY_BYTES)
                common &= {theirs[place : place + _KEY_BYTES] for place in places}
    return {key: own[key] for key in sorted(common)}


def _key(source: Source, held: Held, path: str) -> bytes:
    """Return what ranks have in common that want the same elements; empty if it is not shared."""
    stored = source.manifest.tensor(path)
    assert stored is not None, path
    if held.repeats or not held.length or not held.data.is_contiguous() or held.data.is_conj():
        return b""
    name = source.manifest.aliases.get(path, path)
    text = f"{name} {held.start} {held.length}"
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()


def _read_line(peers: Peers, source: Source, items: Sequence[Wanted]) -> Exception | None:
    begins, total = [], 0
    for held, path in items:
        begins.append(total)
        num_bytes = held.length * dtype_bytes(_stored_dtype(source, path))
        total += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    part = min(_WINDOW_BYTES, total + _ALIGNMENT * peers.size) // peers.size
    part = max(_ALIGNMENT, part // _ALIGNMENT * _ALIGNMENT)
    own = torch.zeros(part, dtype=torch.uint8)
    window = torch.empty(part * peers.size, dtype=torch.uint8)
    error: Exception | None = None
    for first in range(0, total, part * peers.size):
        begin = first + peers.rank * part
        try:
            for piece in _pieces(source, items, begins, begin, begin + part):
                if error is None:
                    _read_piece(source, piece, own[piece.first - begin : piece.last - begin])
        except Exception as raised:  # noqa: BLE001 -- the others wait for this rank's part
            error = raised
        peers.all_gather_bytes(window, own)
        for piece in _pieces(source, items, begins, first, first + window.numel()):
            _put_piece(piece, window[piece.first - first : piece.last - first])
    return error


def _pieces(
    source: Source, items: Sequence[Wanted], begins: Sequence[int], first: int, last: int
) -> Iterator[_Piece]:
    """Return what lies between two places of the line."""
    for (held, path), begin in zip(items, begins, strict=True):
        if begin >= last:
            return
        dtype = dtype_named(_stored_dtype(source, path))
        end = begin + held.length * dtype.itemsize
        if end > first:
            yield _Piece(held, path, dtype, begin, max(begin, first), min(end, last))


def _read_piece(source: Source, piece: _Piece, out: Tensor) -> None:
    start, _ = piece.elements()
    source.read(piece.path, piece.held.start + start, out.view(piece.dtype))


def _put_piece(piece: _Piece, content: Tensor) -> None:
    start, length = piece.elements()
    with torch.no_grad():
        flat = piece.held.data.view(-1)
        flat[start : start + length].copy_(content.view(piece.dtype))


def _stored_dtype(source: Source, path: str) -> str:
    stored = source.manifest.tensor(path)
    assert stored is not None, path
    return stored.dtype
