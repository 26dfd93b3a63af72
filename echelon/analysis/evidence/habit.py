"""What a rank has always done: how much of its latest stream it has called before, in that order.

Training repeats itself, so the end of a stream is mostly found earlier in it. A rank that left a
call out, made one too many or took another order has a short end that is known, back to that
place; ranks that only wait for it have a long one. It takes nothing of other ranks, and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.streams import Streams

_MAX_ROWS = 4096
_HABITUAL = 0.2  # a share below this: the records do not reach back far enough
_CLEARLY = 1.25  # by how much the next rank must be more habitual
_FIELDS = ("group", "call", "site", "peer")


def habit_length(rows: npt.NDArray[Any]) -> int:
    """Return how many of the latest calls, at the end, were made before in the same order."""
    rows = rows[-_MAX_ROWS:]
    if len(rows) < 2:
        return 0
    columns = np.stack([rows[name].astype(np.int64) for name in _FIELDS])
    _, keys = np.unique(columns, axis=1, return_inverse=True)
    keys = keys.reshape(-1)
    ends = np.flatnonzero(keys[:-1] == keys[-1])
    length = 0
    while len(ends):
        length += 1
        ends = ends[ends >= length]
        ends = ends[keys[ends - length] == keys[len(keys) - 1 - length]]
    return length


def least_habitual(streams: Streams, ranks: Iterable[int]) -> int | None:
    """Return the one rank whose calls up to its head are the newest to it.

    None if no rank stands out. What a rank enqueued behind its head says nothing of how it got
    there.
    """
    known = sorted(
        (habit_length(rows) / max(1, len(rows)), rank)
        for rank in ranks
        if rank in streams.evidence.ranks and len(rows := _up_to_head(streams, rank))
    )
    if len(known) < 2 or known[0][0] * _CLEARLY > known[1][0] or known[1][0] < _HABITUAL:
        return None
    return known[0][1]


def _up_to_head(streams: Streams, rank: int) -> npt.NDArray[Any]:
    rows, head = streams.evidence.ranks[rank].rows, streams.heads.get(rank)
    return rows if head is None else rows[: max(head.rows) + 1]
