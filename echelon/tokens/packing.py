"""Pack whole documents into rows of `context` tokens with the first-fit algorithm.

A document of n tokens has n - 1 pairs, each of a token and its successor. A document that is too
long for a row is split into pieces. No pair is lost or duplicated, and no pair spans two documents.
The rest of a row is padding, which counts as a separate document without targets.

Only the last `_NUM_OPEN` rows stay open for further pieces, because a search through all rows would
become slower with every document.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.tokens.shards import TokenShards
from echelon.tokens.windows import NOT_COUNTED, Row

_NUM_OPEN = 512


class Packs:
    """Samples packed from whole documents; only documents longer than a sample are split.

    Construction takes about 4 s and 20 MB per million documents.

    Args:
        shards: the tokens to pack.
        context: T, the number of tokens in a sample.

    Raises:
        ValueError: no document has at least two tokens.
    """

    def __init__(self, shards: TokenShards, context: int) -> None:
        self.shards = shards
        self.context = context
        firsts, sizes = _pieces(shards, context)
        if not len(sizes):
            raise ValueError("no document has at least two tokens: one to read and one to predict")
        rows = first_fit(sizes, context)
        order = np.argsort(rows, kind="stable")
        self._firsts, self._sizes = firsts[order], sizes[order]
        self._ends = np.cumsum(np.bincount(rows))  # of each row's pieces

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def padding(self) -> float:
        """The fraction of padding among the tokens of all rows, from 0 to 1."""
        return 1.0 - float(self._sizes.sum()) / (len(self) * self.context)

    def read(self, number: int) -> Row:
        """Return the sample with the given number.

        Raises:
            TokenShardsError: a file is damaged or was removed.
        """
        begin = int(self._ends[number - 1]) if number else 0
        end = int(self._ends[number])
        filler = self.shards.index.end_of_document or 0
        tokens = np.full(self.context, filler, np.int64)
        targets = np.full(self.context, NOT_COUNTED, np.int64)
        documents = np.full(self.context, end - begin, np.int64)
        at = 0
        for document, piece in enumerate(range(begin, end)):
            size = int(self._sizes[piece])
            found = self.shards.read(int(self._firsts[piece]), size + 1)
            here = slice(at, at + size)
            tokens[here], targets[here], documents[here] = found[:-1], found[1:], document
            at += size
        return Row(tokens=tokens, targets=targets, documents=documents)


def first_fit(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Assign each piece to the first open row that has enough room; return the row numbers.

    Args:
        sizes: the sizes of the pieces, each between 1 and `room`: int64 [num_pieces].
        room: the size of a row.

    Returns:
        The row numbers, counted from 0: int64 [num_pieces]. Each row has at least one piece.
    """
    rows = np.empty(len(sizes), np.int64)
    left = np.full(_NUM_OPEN, room, np.int64)  # the last of them is always empty
    first_open = num_rows = 0
    is_full = sizes == room
    for piece in np.flatnonzero(~is_full).tolist():
        size = sizes[piece]
        found = int(np.argmax(left >= size))
        rows[piece] = first_open + found
        left[found] -= size
        num_rows = max(num_rows, first_open + found + 1)
        if found == _NUM_OPEN - 1:
            left[:-1] = left[1:].copy()
            left[-1] = room
            first_open += 1
    # After the others: among them, they would close rows that have room.
    rows[is_full] = num_rows + np.arange(int(is_full.sum()))
    return rows


def _pieces(shards: TokenShards, context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the position of each piece's first token, and each piece's number of token pairs."""
    ends = shards.ends()
    if len(shards) and (not len(ends) or ends[-1] < len(shards)):
        ends = np.append(ends, len(shards))  # the last document was not ended
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    pairs = ends - starts - 1
    counts = -(-pairs // context)
    owners = np.repeat(np.arange(len(ends)), counts)
    within = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * context
    return starts[owners] + within, np.minimum(context, pairs[owners] - within)
