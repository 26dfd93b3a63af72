"""Both reductions, Python's and C's, bit for bit against another implementation of the rules."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.arithmetic.reduce_numpy import reduce_into
from echelon.dist.backends.shm import native
from echelon.dist.operation.checks import check_reduce_op
from tests.dist import oracle


@pytest.fixture(params=["python", "native"], autouse=True)
def _implementation(request, monkeypatch):
    if request.param == "native":
        if not native.available():
            pytest.skip("the C core was not built here")
        monkeypatch.setattr(sys.modules[__name__], "reduce_into", _reduce_in_c)


def _reduce_in_c(target, parts, op, dtype):
    reduce(target, list(parts), op, dtype)


def _reduce(parts, op, dtype):
    raw = [part.view(np.uint16) if dtype == "bfloat16" else part for part in parts]
    out = np.empty_like(raw[0])
    reduce_into(out, raw, op, dtype)
    return out.view(parts[0].dtype)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_every_op_and_dtype_matches_the_oracle(dtype, num_parts):
    parts = [oracle.data(dtype, [1027], rank) for rank in range(num_parts)]
    for op in oracle.reduce_ops(dtype):
        carried = check_reduce_op(op, dtype)
        seen, expected = _reduce(parts, carried, dtype), oracle.reduced(parts, op)
        oracle.assert_reduced(seen, expected, f"{op} of {dtype}", op, ordered=True)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_the_result_may_lie_in_any_of_the_parts(which):
    parts = [oracle.data("float32", [100], rank) for rank in range(4)]
    expected = oracle.reduced(parts, "sum")
    reduce_into(parts[which], parts, "sum", "float32")
    oracle.assert_reduced(parts[which], expected, f"into part {which}", "sum", ordered=True)


def test_bfloat16_rounds_to_even_and_keeps_nan_and_infinity():
    values = [0x3F80, 0x3F81, 0x7F80, 0xFF80, 0x7FC1, 0x7FFF, 0x7F7F, 0x0001, 0x8000]
    a = np.array(values, np.uint16).view(ml_dtypes.bfloat16)
    b = np.array([0x3B80] * 3 + [0x7F80] + [0x3F80] * 2 + [0x7F7F, 0x0001, 0x8000], np.uint16)
    seen = _reduce([a, b.view(ml_dtypes.bfloat16)], "sum", "bfloat16").view(np.uint16)
    assert seen.tolist() == [
        0x3F80,  # 1 + 2^-8: a tie, to even
        0x3F82,  # the next tie goes up
        0x7F80,  # inf + finite
        0x7FC0,  # -inf + inf
        0x7FC0,  # NaN stays NaN
        0x7FC0,  # also one whose rounding would carry over
        0x7F80,  # overflow
        0x0002,  # denormals are not flushed
        0x8000,  # -0 + -0
    ]


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=40))
def test_narrowing_agrees_with_ml_dtypes_on_any_floats(pairs):
    parts = [
        np.array(side, np.float32).astype(ml_dtypes.bfloat16) for side in zip(*pairs, strict=True)
    ]
    with np.errstate(invalid="ignore"):
        seen, expected = _reduce(parts, "sum", "bfloat16"), oracle.reduced(parts, "sum")
    np.testing.assert_array_equal(seen.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_wins_from_either_side(op, dtype):
    kind = oracle.numpy_dtype(dtype)
    a = np.array([np.nan, 1, np.nan, 2] * 9, kind)
    b = np.array([1, np.nan, np.nan, 3] * 9, kind)
    seen = _reduce([a, b], op, dtype).astype(np.float32)
    assert np.isnan(seen[:3]).all()
    assert seen[3] == (2 if op == "min" else 3)


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("int64", [7, 0, 0, 0], 1),
        ("int64", [-7, 0, 0, 0], -1),  # toward zero, not down
        ("int64", [-(1 << 63), 0], -(1 << 62)),
        ("int8", [100, 100, 100, 100], -28),  # 400 wraps to -112
        ("uint8", [200, 100], 22),  # 300 wraps to 44
        ("uint64", [(1 << 64) - 1, 0], (1 << 63) - 1),
        ("int8", [-128] + [0] * 199, 0),  # more parts than the type can count
        ("int8", [-1] * 128, -1),
        ("uint8", [0] * 255 + [255], 0),
    ],
)
def test_the_average_of_integers_is_their_sum_truncated_toward_zero(dtype, values, expected):
    seen = _reduce([np.array([value], dtype) for value in values], "avg", dtype)
    assert seen.tolist() == [expected]
