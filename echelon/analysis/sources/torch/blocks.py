"""Determine the state of coalesced blocks whose closing entry is not in the dump.

The operations inside a block (its parts) have no state of their own. The closing entry is missing
if the block completed and the dump lists only active entries, or if the block was still open. The
group's later operations and its counters show whether the block completed.

A single message can look like a part of a block. The group's other entries show whether it is a
part of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.sources.torch.counters import Tops
from echelon.recorder.format.schema import Flag, State

_FAR = 1 << 62


def finish_unclosed(
    rows: npt.NDArray[Any],
    *,
    batched: frozenset[int],
    tops: Mapping[int, Tops],
    status: Mapping[int, tuple[int, int]],
) -> None:
    """Mark the operations inside each block as completed if the block has completed.

    Args:
        rows: one rank's rows, modified in place. `group` is the index of a (name, description)
            pair.
        batched: the pairs in which this rank closes blocks of messages.
        tops: the highest value of each counter, per pair.
        status: the (last enqueued, last completed) numbers, keyed by local group number.
    """
    is_message = (rows["flags"] & Flag.P2P) > 0
    numbers = np.where(is_message, rows["p2p_sequence"], rows["sequence"])
    open_ = (rows["state"] == State.CREATED) & (rows["coalesced"] < 0) & (rows["started_ns"] == 0)
    done = is_message & (rows["state"] == State.COMPLETED) & (rows["coalesced"] < 0)
    stateful = frozenset(rows["group"][done].tolist())
    listed = set(zip(rows["group"][is_message].tolist(), numbers[is_message].tolist(), strict=True))
    for pair, message, number, parts in _blocks(rows, numbers, is_message, open_):
        if len(parts) < 2 and not message:
            continue
        top = tops[pair]
        enqueued, completed = status.get(top.local_number, (_FAR, _FAR))
        if len(parts) > 1 or pair in batched:
            is_closed = _is_followed(top, message, number) or enqueued >= number
        elif pair in stateful:
            is_closed = False
        else:
            # A block leaves its parts in the list when it completes; a single message leaves none.
            is_listed = (pair, completed) in listed
            is_closed = top.collectives == 0 and number <= completed < _FAR and is_listed
        if is_closed:
            rows["state"][parts] = State.COMPLETED


def _is_followed(top: Tops, message: bool, number: int) -> bool:
    return (top.messages if message else top.collectives) > number


def _blocks(
    rows: npt.NDArray[Any],
    numbers: npt.NDArray[Any],
    is_message: npt.NDArray[np.bool_],
    open_: npt.NDArray[np.bool_],
) -> Iterator[tuple[int, bool, int, list[int]]]:
    """Yield a tuple `(pair, is_message, number, rows)` for each open block."""
    blocks: dict[tuple[int, bool, int], list[int]] = {}
    for index in np.flatnonzero(open_).tolist():
        key = (int(rows["group"][index]), bool(is_message[index]), int(numbers[index]))
        blocks.setdefault(key, []).append(index)
    for (pair, message, number), parts in blocks.items():
        yield pair, message, number, parts
