"""Reduce the ranks' arrays in rank order with NumPy.

The fixed order makes the result bitwise identical on every rank and in every run. 16-bit floats are
accumulated in float32 and rounded once, to nearest even. Integer sums wrap around at the width of
their dtype. An average of integers is the sum divided by the number of ranks and truncated toward
zero, as in NCCL. The average is wrong if the sum wraps around.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.dist.arithmetic.halves import HALVES, narrow_slowly, widen_slowly
from echelon.dist.operation.arrays import Flat

_COMBINE: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BLOCK = 1 << 16  # elements; the widened block of each part stays in the second-level cache


def reduce_into(target: Flat, parts: Sequence[Flat], reduce_op: str, dtype: str) -> None:
    """Reduce `parts`, one array per rank, into `target`. All arrays have the same length and dtype.

    `target` can share memory with one of `parts`.
    """
    if dtype in HALVES and reduce_op not in ("band", "bor", "bxor"):
        for start in range(0, len(target), _BLOCK):
            block = slice(start, start + _BLOCK)
            _reduce_halves(target[block], [part[block] for part in parts], reduce_op, dtype)
        return
    if len(parts) == 1:
        np.copyto(target, parts[0])
        return
    combine = _COMBINE[reduce_op]
    shares_later_part = any(np.may_share_memory(target, part) for part in parts[2:])
    out = np.empty_like(target) if shares_later_part else target
    with np.errstate(over="ignore", invalid="ignore"):
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
    if reduce_op == "avg":
        divide(out, len(parts), dtype)
    if out is not target:
        np.copyto(target, out)


def divide(data: Flat, count: int, dtype: str) -> None:
    """Divide sums by `count` in place; integer results are truncated toward zero.

    Args:
        data: [numel], of any dtype that can be averaged, except 16-bit floats.
    """
    if dtype in ("float32", "float64"):
        np.divide(data, data.dtype.type(count), out=data)
        return
    wide = np.uint64 if data.dtype.kind == "u" else np.int64  # holds `count`, which int8 may not
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        total, divisor = block.astype(wide), wide(count)
        np.copyto(block, (total - np.fmod(total, divisor)) // divisor, casting="same_kind")


def _reduce_halves(target: Flat, parts: Sequence[Flat], reduce_op: str, dtype: str) -> None:
    combine = _COMBINE[reduce_op]
    total = widen_slowly(parts[0], dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results
        for part in parts[1:]:
            combine(total, widen_slowly(part, dtype), out=total)
    if reduce_op == "avg":
        total /= np.float32(len(parts))
    narrow_slowly(target, total, dtype)
