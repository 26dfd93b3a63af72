"""Split reads across ranks, so that elements needed by several ranks are read only once.

A line (see `sharing.py`) is read in windows. Each rank that needs the line reads and verifies an
equal part of every window. The ranks then exchange these parts: with an all_gather if all ranks
need the line, and with an all_to_all otherwise. Data that only one rank needs is read by that rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.dist.checkpoint.disk.source import Source, fill
from echelon.dist.checkpoint.ranks.peers import Peers
from echelon.dist.checkpoint.ranks.sharing import (
    ALIGNMENT,
    Line,
    Piece,
    Wanted,
    aligned,
    find_lines,
)

_WINDOW_BYTES = 64 << 20


def read(peers: Peers, source: Source, wanted: Sequence[Wanted]) -> Exception | None:
    """Fill all requested tensors; return this rank's first error, or None. Collective."""
    reading = _Reading(peers, source)
    if peers.size > 1:
        lines = find_lines(peers, source, wanted)
        if lines.for_all is not None:
            reading.for_all(lines.for_all)
        if lines.has_some:
            reading.for_some(lines.for_some)
    reading.alone(wanted)
    return reading.error


class _Reading:
    """One rank's work in a collective read of a version.

    Attributes:
        error: this rank's first error. After an error, the rank takes part in the exchanges without
            reading.
    """

    def __init__(self, peers: Peers, source: Source) -> None:
        self.error: Exception | None = None
        self._peers = peers
        self._source = source
        self._done: set[int] = set()  # ids of what was filled

    def for_all(self, line: Line) -> None:
        """Read the data that every rank needs. Collective."""
        peers = self._peers
        part = min(_WINDOW_BYTES, line.num_bytes + ALIGNMENT * peers.size) // peers.size
        part = max(ALIGNMENT, part // ALIGNMENT * ALIGNMENT)
        own = torch.zeros(part, dtype=torch.uint8)
        window = torch.empty(part * peers.size, dtype=torch.uint8)
        for first in range(0, line.num_bytes, window.numel()):
            self._read(line, first + peers.rank * part, own)
            peers.all_gather_bytes(window, own)
            _put(line, first, window)
        self._note(line)

    def for_some(self, lines: Sequence[Line]) -> None:
        """Read the data that only some ranks need. All ranks must call this method."""
        peers = self._peers
        num_bytes = sum(line.num_bytes for line in lines)
        num_rounds = max(peers.all_gather(-(-num_bytes // _WINDOW_BYTES)))
        for number in range(num_rounds):
            self._round(lines, number, num_rounds)
        for line in lines:
            self._note(line)

    def _round(self, lines: Sequence[Line], number: int, num_rounds: int) -> None:
        """Read this rank's part of window `number` of each `Line`, and exchange the parts."""
        rank, size = self._peers.rank, self._peers.size
        parts = [aligned(-(-line.num_bytes // (num_rounds * len(line.ranks)))) for line in lines]
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        places: list[list[tuple[Line, int, int]]] = [[] for _ in range(size)]
        for line, part in zip(lines, parts, strict=True):
            own = torch.zeros(part, dtype=torch.uint8)
            window = number * part * len(line.ranks)
            for place, other in enumerate(line.ranks):
                first = window + place * part
                if other == rank:
                    self._read(line, first, own)
                    _put(line, first, own)
                else:
                    sent[other].append(own)
                    places[other].append((line, first, part))
        received = self._peers.all_to_all_bytes(
            [_joined(tensors) for tensors in sent],
            [sum(part for *_, part in there) for there in places],
        )
        for content, there in zip(received, places, strict=True):
            contents = torch.split(content, [part for *_, part in there])
            for (line, first, _), own in zip(there, contents, strict=True):
                _put(line, first, own)

    def alone(self, wanted: Sequence[Wanted]) -> None:
        """Read the data that only this rank needs."""
        try:
            for held, path in wanted:
                if self.error is None and id(held) not in self._done:
                    fill(self._source, held, path)
        except Exception as raised:  # noqa: BLE001 -- all ranks raise it together
            self.error = raised

    def _read(self, line: Line, first: int, out: Tensor) -> None:
        """Fill `out` with bytes from a `Line`, beginning at the line's byte number `first`."""
        try:
            for piece in line.pieces(first, first + out.numel()):
                if self.error is None:
                    self._read_piece(piece, out[piece.first - first : piece.last - first])
        except Exception as raised:  # noqa: BLE001 -- the others wait for this rank's part
            self.error = raised

    def _read_piece(self, piece: Piece, out: Tensor) -> None:
        start, _ = piece.elements()
        self._source.read(piece.path, piece.held.start + start, out.view(piece.dtype))

    def _note(self, line: Line) -> None:
        self._done |= {id(held) for held, _ in line.items}


def _put(line: Line, first: int, content: Tensor) -> None:
    """Copy `content`, the bytes of a `Line` from byte `first` onward, into the line's tensors."""
    for piece in line.pieces(first, first + content.numel()):
        start, length = piece.elements()
        part = content[piece.first - first : piece.last - first].view(piece.dtype)
        with torch.no_grad():
            piece.held.data.view(-1)[start : start + length].copy_(part)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.uint8)
