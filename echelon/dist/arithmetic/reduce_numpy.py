"""Sum, and the other reductions, over the ranks' parts in rank order.

The order makes the result the same, bit for bit, on every rank and in every run. 16-bit floats are
accumulated in float32 and rounded once, to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
_BFLOAT16_NAN = 0x7FC0
_BLOCK = 1 << 16  # elements; the widened block of each part stays in the second-level cache


def reduce_into(target: Flat, parts: Sequence[Flat], reduce_op: str, dtype: str) -> None:
    """Write the reduction of `parts` over ranks into `target`, all of one length and dtype.

    `target` may be the same memory as one of the parts.
    """
    if dtype in ("float16", "bfloat16") and reduce_op not in ("band", "bor", "bxor"):
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
        np.divide(out, len(parts), out=out)
    if out is not target:
        np.copyto(target, out)


def _reduce_halves(target: Flat, parts: Sequence[Flat], reduce_op: str, dtype: str) -> None:
    widen: Callable[[Flat], npt.NDArray[np.float32]] = (
        widen_bfloat16 if dtype == "bfloat16" else _widen_float16
    )
    combine = _COMBINE[reduce_op]
    total = widen(parts[0])
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results
        for part in parts[1:]:
            combine(total, widen(part), out=total)
    if reduce_op == "avg":
        total /= np.float32(len(parts))
    if dtype == "bfloat16":
        narrow_bfloat16(total, target)
    else:
        with np.errstate(over="ignore"):
            np.copyto(target, total, casting="same_kind")


def _widen_float16(part: Flat) -> npt.NDArray[np.float32]:
    return part.astype(np.float32)


def widen_bfloat16(part: Flat) -> npt.NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    wide = part.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def narrow_bfloat16(total: npt.NDArray[np.float32], target: Flat) -> None:
    """Round to nearest even: add half of the lost part, minus one if the kept part is even."""
    bits: npt.NDArray[Any] = total.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    target[:] = rounded.astype(np.uint16)
    nans = np.isnan(total)
    if nans.any():
        target[nans] = _BFLOAT16_NAN
