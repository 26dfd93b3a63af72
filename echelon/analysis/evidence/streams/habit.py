"""Measure how many of a rank's latest calls repeat a sequence of its earlier calls.

A training loop repeats the same calls in every step. If a rank is merely waiting, many of its
latest calls therefore repeat earlier calls. If a rank left out a call, made an extra call or
changed the order, only the few calls after that deviation repeat earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence.streams.streams import Streams
from echelon.recorder.format.schema import Flag, State

_MAX_ROWS = 4096
_HABITUAL = 0.4  # a smaller share means that the records do not reach back far enough
_CLEARLY = 2.0  # by how much the next rank must be more habitual
_MIN_CALLS = 12  # with fewer, there is no history that a call could break with
_CONTEXTS = (8, 4, 2, 1)  # length of the context that predicts the next call
_SHIFTS = (1, 2, 3)
_MATCHED = 2  # calls that must agree after a slip: a single one may itself be out of order
_FIELDS = ("group", "call", "site", "peer")


def habit_length(rows: npt.NDArray[Any]) -> int:
    """Return the length of the longest suffix of calls that also occurs earlier in the record."""
    if len(rows) < 2:
        return 0
    keys = _keys(rows)
    ends = np.flatnonzero(keys[:-1] == keys[-1])
    length = 0
    while len(ends):
        length += 1
        ends = ends[ends >= length]
        ends = ends[keys[ends - length] == keys[len(keys) - 1 - length]]
    return length


def _keys(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    rows = rows[-_MAX_ROWS:]
    columns = np.stack([*(rows[name].astype(np.int64) for name in _FIELDS), in_one_launch(rows)])
    _, keys = np.unique(columns, axis=1, return_inverse=True)
    return np.asarray(keys.reshape(-1), np.int64)


def in_one_launch(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return, for each row, 1 if it is a message launched together with the preceding one, else 0.

    The shape of the result is [num_rows].
    """
    is_message = (rows["flags"] & Flag.P2P) > 0
    together = is_message.copy()
    together[:1] = False
    for name in ("p2p_sequence", "group"):
        together[1:] &= rows[name][1:] == rows[name][:-1]
    together[1:] &= is_message[:-1]
    return np.asarray(together, np.int64)


def least_habitual(streams: Streams, ranks: Iterable[int]) -> int | None:
    """Return the rank with by far the smallest fraction of repeated calls.

    The result is None if no rank stands out. Calls that are queued behind the head of a rank's
    queue are ignored.
    """
    known = sorted(
        (habit_length(rows) / max(1, len(rows)), rank)
        for rank in ranks
        if rank in streams.evidence.ranks
        and len(rows := _up_to_head(streams, rank)) >= _MIN_CALLS
        and bool((rows["state"] == State.COMPLETED).any())
    )
    if len(known) < 2 or known[0][0] * _CLEARLY > known[1][0] or known[1][0] < _HABITUAL:
        return None
    return known[0][1]


def _up_to_head(streams: Streams, rank: int) -> npt.NDArray[Any]:
    rows, head = streams.evidence.ranks[rank].rows, streams.heads.get(rank)
    return rows if head is None else rows[: max(head.rows) + 1]


def slip_of(streams: Streams, rank: int) -> tuple[str, int] | None:
    """Find a missing or an extra call among a rank's latest calls.

    Returns:
        "left out" and the row at which the missing call was last made, or "extra" and the row of
        the superfluous call; None if undecided.
    """
    rows = streams.evidence.ranks[rank].rows
    known = _up_to_head(streams, rank)
    if len(known) < _MIN_CALLS or len(known) > _MAX_ROWS:
        return None
    place = len(known) - max(1, habit_length(known))
    keys = _keys(rows[-_MAX_ROWS:]).tolist()
    if len(rows) > _MAX_ROWS or not 0 < place < len(keys):
        return None
    before = _last_time(keys, place)
    if before is None:
        return None
    for shift in _SHIFTS:
        if _agree(keys[place:], keys[before + shift : place]):
            return "left out", before
    for shift in _SHIFTS:
        if place + shift < len(keys) and _agree(keys[place + shift :], keys[before:place]):
            return "extra", place
    is_new = keys[place] not in keys[:place] and not known[place]["flags"] & Flag.P2P
    return ("extra", place) if is_new else None


def _last_time(keys: list[int], place: int) -> int | None:
    """Return the nearest earlier position whose call differs from the call at `place`.

    Only positions preceded by the same calls as `place` are considered. The result is None if there
    is no such position.
    """
    for length in _CONTEXTS:
        context = keys[place - length : place]
        if place < length:
            continue
        for end in range(place - 1, length - 1, -1):
            if keys[end - length : end] == context and keys[end] != keys[place]:
                return end
    return None


def _agree(one: list[int], other: list[int]) -> bool:
    length = min(len(one), len(other))
    return length >= _MATCHED and one[:length] == other[:length]
