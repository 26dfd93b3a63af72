"""What every collective must give, in plain NumPy: independent of the package's own arithmetic.

Sums go in rank order; 16-bit floats are widened to float32 by their own libraries, summed there and
rounded once. All engines that sum in rank order must match bit for bit.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
_FEWEST_WITH_AWKWARD = 24
_UFUNCS = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def reduce_ops(dtype: str) -> tuple[str, ...]:
    if dtype in FLOATS:
        return ("sum", "avg", "min", "max", "prod")
    if dtype == "bool":
        return ("sum", "min", "max", "prod", "band", "bor", "bxor")
    return ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")


def data(dtype: str, shape: Sequence[int], rank: int, seed: int = 0) -> Array:
    """Return a rank's deterministic input; of 24 elements and more, some are awkward.

    They lie at the same places on every rank, so that what must come out does not depend on the
    order in which ranks are summed: NaN and infinities, -0, denormals, sums that overflow, and the
    ends of an integer's range.
    """
    rng = np.random.default_rng([seed, rank, zlib.crc32(dtype.encode()), *shape])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        made = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    else:
        made = rng.uniform(-4, 4, shape).astype(numpy_dtype(dtype))
    awkward = _awkward_integers(dtype, rank) if dtype in INTEGERS else _awkward_floats(dtype, rank)
    if made.size >= _FEWEST_WITH_AWKWARD:
        places = np.arange(len(awkward)) * (made.size // len(awkward))
        made.reshape(-1)[places] = awkward
    return made


def _awkward_floats(dtype: str, rank: int) -> Array:
    info = ml_dtypes.finfo(numpy_dtype(dtype))
    largest, inf, is_even = float(info.max), np.inf, rank % 2 == 0
    return np.array(
        [
            np.nan,
            np.nan if rank == 1 else 1.0,
            inf if is_even else 1.0,
            inf if is_even else -inf,
            -inf,
            -0.0,
            0.0 if is_even else -0.0,
            float(info.smallest_subnormal),
            -3 * float(info.smallest_subnormal),
            largest,
            -largest,
            largest * 0.6,
        ]
    ).astype(numpy_dtype(dtype))


def _awkward_integers(dtype: str, rank: int) -> Array:
    info = np.iinfo(dtype)
    ends = (info.min, info.max)
    wide = [*ends, ends[rank % 2], 0, 1, info.max - rank, info.min + rank]
    return np.array(wide + [-1, -7 * rank] * (info.min < 0), dtype)


def reduced(parts: Sequence[Array], op: str) -> Array:
    dtype = parts[0].dtype
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.itemsize == 2 and dtype.kind not in "iu":
            wide = functools.reduce(_UFUNCS[op], [part.astype(np.float32) for part in parts])
            if op == "avg":
                wide = wide / np.float32(len(parts))
            return np.asarray(wide.astype(dtype))
        total = np.asarray(
            functools.reduce(_UFUNCS[_on_bool(op) if dtype.kind == "b" else op], parts)
        )
        if op != "avg":
            return total
        if dtype.kind not in "iu":
            return np.asarray(total / dtype.type(len(parts)))
    assert len(parts) <= np.iinfo(dtype).max
    floor, rest = np.divmod(total, dtype.type(len(parts)))
    return np.asarray(floor + ((rest != 0) & (total < 0)).astype(dtype))  # toward zero


def _on_bool(op: str) -> str:
    return {"sum": "bor", "prod": "band"}.get(op, op)


def assert_reduced(seen: Array, expected: Array, what: str, op: str, *, ordered: bool) -> None:
    """Compare a reduction: bit for bit where the result does not depend on the order.

    NaN is NaN, whatever its bits; min and max of 0 and -0 may be either. Sums, averages and
    products of floats may differ where the library chooses the order (`ordered` False), by some
    roundings in float32, and by the one rounding to 16 bits.
    """
    if expected.dtype.kind in "iub":
        assert_same_bits(seen, expected, what)
        return
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype} != {expected.dtype}"
    exact = ordered or op not in ("sum", "avg", "prod")
    zero = np.zeros(1, expected.dtype)
    nan = np.isnan(expected)
    assert (np.isnan(seen) == nan).all(), f"{what}: NaN in other places"
    clean = [np.where(nan, zero, one) for one in (seen, expected)]
    if op in ("min", "max"):
        clean = [one + zero for one in clean]  # -0 + 0 is 0
    if exact:
        assert_same_bits(*clean, what)
    else:
        _assert_close(*clean, what)


def assert_same_bits(seen: Array, expected: Array, what: str) -> None:
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype} != {expected.dtype}"
    assert seen.shape == expected.shape, f"{what}: {seen.shape} != {expected.shape}"
    if seen.tobytes() != expected.tobytes():
        flat, want = seen.reshape(-1), expected.reshape(-1)
        where = int(np.flatnonzero(flat.view(np.uint8) != want.view(np.uint8))[0]) // seen.itemsize
        raise AssertionError(f"{what}: element {where} is {flat[where]}, expected {want[where]}")


def _assert_close(seen: Array, expected: Array, what: str) -> None:
    own = float(ml_dtypes.finfo(expected.dtype).eps)
    wide = float(np.finfo(np.float32).eps) if expected.dtype.itemsize == 2 else own
    with np.errstate(invalid="ignore"):  # infinities are compared, too
        np.testing.assert_allclose(
            seen.astype(np.float64), expected.astype(np.float64), err_msg=what,
            rtol=own if expected.dtype.itemsize == 2 else 8 * own, atol=64 * wide,
        )  # fmt: skip
