"""Perform small operations by sending the data along with the description of the call.

Before every collective, backends that use connections compare the ranks' calls in one exchange.
That exchange also carries up to 256 bytes of data per rank, and each rank computes the result from
the data of all ranks. So a small operation costs one exchange instead of two.
"""

from __future__ import annotations

import numpy as np

from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import HEAD_BYTES, Operation

_DATA_BYTES = 256
_KINDS = frozenset({"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"})


def pack(operation: Operation) -> Flat:
    """Return the bytes to send: the operation's number, its call and, if small, its data.

    The length is the same for every operation, so that ranks with different calls can still
    exchange the calls and compare them.
    """
    packed = np.zeros(HEAD_BYTES + _DATA_BYTES, np.uint8)
    packed[: len(operation.head)] = np.frombuffer(operation.head, np.uint8)
    source = operation.source
    if source is not None and is_small(operation):
        packed[HEAD_BYTES : HEAD_BYTES + source.nbytes] = source.view(np.uint8)
    return packed


def are_equal(rows: Flat, mine: Flat) -> bool:
    """Return whether all ranks made the same call as this rank.

    Args:
        rows: the packed bytes of all ranks, [num_ranks, num_packed_bytes].
        mine: the packed bytes of this rank.
    """
    return bool((rows[:, :HEAD_BYTES] == mine[:HEAD_BYTES]).all())


def calls(rows: Flat) -> list[bytes]:
    """Return the operation number and call description that each rank sent, as packed bytes."""
    return [row[:HEAD_BYTES].tobytes() for row in rows]


def is_small(operation: Operation) -> bool:
    """Return whether an operation's data is sent along with the description of its call.

    The result is the same on all ranks that make identical calls.
    """
    data = operation.target if operation.source is None else operation.source
    if operation.input_splits or operation.output_splits:
        return False  # sizes differ between the ranks
    return operation.kind in _KINDS and data is not None and 0 < data.nbytes <= _DATA_BYTES


def finish(operation: Operation, rows: Flat, rank: int) -> None:
    """Compute a small operation's result from all ranks' data, and store it in `operation.target`.

    Args:
        rows: the packed bytes of all ranks, [num_ranks, num_packed_bytes].
        rank: this rank's index in `rows`.
    """
    source, target = operation.source, operation.target
    if target is None:
        return
    given = target if source is None else source
    parts = [row[HEAD_BYTES : HEAD_BYTES + given.nbytes].copy().view(given.dtype) for row in rows]
    if operation.kind == "broadcast":
        np.copyto(target, parts[operation.root])
    elif operation.kind == "all_gather":
        np.copyto(target, np.concatenate(parts))
    else:
        if operation.kind == "reduce_scatter":
            parts = [part.reshape(len(rows), len(target))[rank] for part in parts]
        reduce(target, parts, operation.reduce_op, operation.dtype)
