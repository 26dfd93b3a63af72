"""Choose the dtype in which a two-level engine accumulates, and provide memory for the sums.

Such an engine first reduces within each host and then across hosts. Sums of 16-bit floats are
passed from one level to the other as float32, so they are rounded only once, at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.dist.arithmetic.halves import HALVES, narrow, widen
from echelon.dist.operation.arrays import Flat
from echelon.dist.operation.operation import Operation

_MOST_KEPT_BYTES = 4 << 20


def array_of(data: Flat | None) -> Flat:
    """Return an operation's array after asserting that it is not None."""
    assert data is not None
    return data


def summing_of(operation: Operation) -> str:
    """Return the reduction to perform at each level, within hosts and across hosts.

    For an average, each level computes a sum, and only the final sum is divided.
    """
    return "sum" if operation.reduce_op == "avg" else operation.reduce_op


def wide_of(operation: Operation) -> str:
    """Return the dtype in which each level of a reduction accumulates.

    It is float32 for sums, averages and products of 16-bit floats; otherwise the array's dtype.
    """
    rounds = operation.dtype in HALVES and operation.reduce_op in ("sum", "avg", "prod")
    return "float32" if rounds else operation.dtype


def carried_of(operation: Operation) -> np.dtype[Any]:
    """Return the NumPy dtype that corresponds to the result of `wide_of`."""
    data = array_of(operation.source if operation.target is None else operation.target)
    return np.dtype(np.float32) if wide_of(operation) != operation.dtype else data.dtype


def convert(dtype: str, out: Flat, data: Flat) -> None:
    """Copy `data` into `out`, converting to or from the accumulation dtype if necessary."""
    if out is data:
        return
    if out.dtype == data.dtype:
        np.copyto(out, data)
    elif out.dtype == np.float32:
        widen(out, data, dtype)
    else:
        narrow(out, data, dtype)


class Scratch:
    """Reusable memory for the steps of an operation. Buffers above 4 MiB are not reused."""

    def __init__(self) -> None:
        self._kept: dict[str, Flat] = {}

    def take(self, name: str, length: int, dtype: Any) -> Flat:
        """Return the named buffer, of shape [length], with undefined contents."""
        num_bytes = length * np.dtype(dtype).itemsize
        if num_bytes > _MOST_KEPT_BYTES:
            return np.empty(length, dtype)
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < num_bytes:
            kept = self._kept[name] = np.empty(max(num_bytes, 1), np.uint8)
        return kept[:num_bytes].view(dtype)
