"""Split a `coalesce()` block into lists of operations that can run concurrently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.dist.backends.device.pending import DevicePending
from echelon.dist.operation.operation import Operation


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that is waiting to be launched."""

    operation: Operation
    pending: DevicePending
    check: Callable[[], None]


def connection_key(operation: Operation) -> tuple[object, ...]:
    """Return a key that identifies the connections that an operation uses."""
    sizes = tuple(
        None if data is None else data.nbytes for data in (operation.source, operation.target)
    )
    splits = (operation.input_splits, operation.output_splits)
    return operation.kind, operation.reduce_op, operation.dtype, operation.root, sizes, splits


def apart(batch: Sequence[Call]) -> list[list[Call]]:
    """Split a batch, in order, into lists of operations whose memory does not overlap.

    A library is allowed to run the operations in one list concurrently.
    """
    parts: list[list[Call]] = []
    used: list[tuple[int, int]] = []
    for call in batch:
        mine = _spans(call.operation)
        is_free = all(end <= low or high <= start for low, high in mine for start, end in used)
        if not parts or not is_free:
            parts.append([])
            used = []
        parts[-1].append(call)
        used += mine
    return parts


def _spans(operation: Operation) -> list[tuple[int, int]]:
    arrays: list[Any] = [data for data in (operation.source, operation.target) if data is not None]
    return [(data.pointer, data.pointer + data.nbytes) for data in arrays]
