"""What every collective must give, in plain NumPy: independent of the package's own arithmetic.

Sums go in rank order; 16-bit floats are widened to float32 by their own libraries, summed there and
rounded once. All engines that sum in rank order must match bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
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
        return ("min", "max", "band", "bor", "bxor")
    return ("sum", "min", "max", "prod", "band", "bor", "bxor")


def data(dtype: str, shape: Sequence[int], rank: int, seed: int = 0) -> Array:
    """Return a rank's deterministic input: awkward values among them."""
    rng = np.random.default_rng([seed, rank, len(dtype), *shape])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return rng.uniform(-4, 4, shape).astype(numpy_dtype(dtype))


def reduced(parts: Sequence[Array], op: str) -> Array:
    dtype = parts[0].dtype
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        wide = functools.reduce(_UFUNCS[op], [part.astype(np.float32) for part in parts])
        if op == "avg":
            wide = wide / np.float32(len(parts))
        with np.errstate(over="ignore"):
            return np.asarray(wide.astype(dtype))
    with np.errstate(over="ignore"):
        total = functools.reduce(_UFUNCS[op], parts)
    return np.asarray(total / dtype.type(len(parts)) if op == "avg" else total)


def assert_same_bits(seen: Array, expected: Array, what: str) -> None:
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype} != {expected.dtype}"
    assert seen.shape == expected.shape, f"{what}: {seen.shape} != {expected.shape}"
    if seen.tobytes() != expected.tobytes():
        flat, want = seen.reshape(-1), expected.reshape(-1)
        where = int(np.flatnonzero(flat.view(np.uint8) != want.view(np.uint8))[0]) // seen.itemsize
        raise AssertionError(f"{what}: element {where} is {flat[where]}, expected {want[where]}")


def assert_close(seen: Array, expected: Array, what: str) -> None:
    """Compare where the library chooses the order of summation."""
    if seen.dtype.kind in "iub":
        assert_same_bits(seen, expected, what)
        return
    tolerance = {2: 4e-2, 4: 1e-5, 8: 1e-12}[seen.dtype.itemsize]
    np.testing.assert_allclose(
        seen.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance * 8,
        err_msg=what,
    )  # fmt: skip
