"""Small operations: what a rank gives travels with what it called.

Backends over connections compare calls before every collective, which is an exchange of its own. Up
to 256 bytes of data go along in it, and each rank works out its result from every rank's: a small
operation costs one exchange instead of two.
"""

from __future__ import annotations

import numpy as np

from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import HEAD_BYTES, Operation

_DATA_BYTES = 256
_KINDS = frozenset({"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"})


def pack(operation: Operation) -> Flat:
    """Return what this rank sends: number and call of the operation, and its data if it is small.

    The same number of bytes for every operation, so that ranks that differ can be compared.
    """
    packed = np.zeros(HEAD_BYTES + _DATA_BYTES, np.uint8)
    packed[: len(operation.head)] = np.frombuffer(operation.head, np.uint8)
    source = operation.source
    if source is not None and is_small(operation):
        packed[HEAD_BYTES : HEAD_BYTES + source.nbytes] = source.view(np.uint8)
    return packed


def are_equal(rows: Flat, mine: Flat) -> bool:
    """Return whether all called what this rank did; rows: [num_ranks, packed bytes]."""
    return bool((rows[:, :HEAD_BYTES] == mine[:HEAD_BYTES]).all())


def calls(rows: Flat) -> list[bytes]:
    """Return number and call of what each rank called."""
    return [row[:HEAD_BYTES].tobytes() for row in rows]


def is_small(operation: Operation) -> bool:
    """Whether its data went along; ranks with equal calls agree on that."""
    data = operation.target if operation.source is None else operation.source
    if operation.input_splits or operation.output_splits:
        return False  # sizes differ between the ranks
    return operation.kind in _KINDS and data is not None and 0 < data.nbytes <= _DATA_BYTES


def finish(operation: Operation, rows: Flat, rank: int) -> None:
    """Write a small operation's result; rows: every rank's, in rank order, as sums are."""
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
