"""The caller's arguments: what is taken, what is refused, and what the error quotes."""

from __future__ import annotations

import math
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest

from echelon.dist.operation import checks
from echelon.dist.operation.arrays import view
from echelon.dist.operation.operation import CALL_BYTES, describe_call, encode_call, encode_dtype

torch = pytest.importorskip("torch")


class _Index:
    def __index__(self):
        return 2


@pytest.mark.parametrize("value", [2, np.int8(2), np.uint64(2), torch.tensor(2), _Index()])
def test_every_integer_is_an_index(value):
    taken = checks.check_index(value, "root")
    assert (taken, type(taken)) == (2, int)
    assert checks.check_rank(value, "root", "world", 3) == 2
    assert checks.check_tag(value) == 2
    assert checks.check_ranks([value, 0], 4) == (2, 0)


@pytest.mark.parametrize("value", [1.0, 1.7, "1", True, np.True_, None, np.float32(1), [1]])
def test_what_is_not_an_integer_is_refused_by_name(value):
    rows = view(np.zeros((1, 3)), "x", writable=False)
    for call in (
        lambda: checks.check_rank(value, "it", "world", 4),
        lambda: checks.check_splits("it", [value], rows, 1),
    ):
        with pytest.raises(ValueError, match=r"it: .* is not an integer"):
            call()
    with pytest.raises(ValueError, match="is not an integer"):
        checks.check_tag(value)
    with pytest.raises(ValueError, match="is not an integer"):
        checks.check_ranks([value], 4)


def test_splits_are_whole_rows_that_add_up():
    rows = view(np.zeros((5, 3)), "x", writable=False)
    assert checks.check_splits("splits", [2, np.int64(3)], rows, 2) == (6, 9)
    for bad in ([5], [6, -1], [2, 2], [1, 2, 2]):
        with pytest.raises(ValueError, match="add up to the 5 rows"):
            checks.check_splits("splits", bad, rows, 2)


def _pair(large, small, rank):
    views = view(large, "out", writable=True), view(small, "x", writable=False)
    checks.check_pair("all_gather", "out", views[0], "x", views[1], 2, rank)


def test_an_array_may_be_exactly_this_ranks_part_of_the_other():
    out = np.zeros((2, 3), np.float32)
    _pair(out, out[0], 0)
    _pair(out, out[1], 1)
    _pair(out, torch.from_numpy(out)[1], 1)
    _pair(np.zeros((2, 0)), np.zeros(0), 1)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_other_overlap_is_refused(library):
    flat = np.zeros(7, np.float32)
    out, views = flat[:6], [flat[0:3], flat[1:4], flat[4:7]]
    if library == "torch":  # the same memory, seen by another library
        views = [torch.from_numpy(one) for one in views]
    for x in views:
        with pytest.raises(ValueError, match=r"overlap in memory.*exactly this rank's part"):
            _pair(out, x, 1)
    _pair(flat[:4], flat[4:6], 1)  # neighbors share nothing


def test_device_arrays_are_compared_by_address():
    class Device:
        def __init__(self, address, shape):
            self.__cuda_array_interface__ = {
                "version": 3, "shape": shape, "typestr": "<f4", "data": (address, False),
            }  # fmt: skip

    _pair(Device(4096, (6,)), Device(4096 + 12, (3,)), 1)
    _pair(Device(4096, (6,)), Device(4096 + 24, (3,)), 1)
    with pytest.raises(ValueError, match="overlap"):
        _pair(Device(4096, (6,)), Device(4096 + 8, (3,)), 1)


def test_arrays_on_two_devices_are_refused():
    class Device:
        def __init__(self, index, shape):
            self.device = type("Place", (), {"id": index})
            self.__cuda_array_interface__ = {
                "version": 3, "shape": shape, "typestr": "<f4", "data": (4096, False),
            }  # fmt: skip

    with pytest.raises(ValueError, match="out is on cuda:0, but x is on cuda:1"):
        _pair(Device(0, (6,)), Device(1, (3,)), 0)
    with pytest.raises(ValueError, match="out is on cuda:0, but x is on cpu"):
        _pair(Device(0, (6,)), np.zeros(3, np.float32), 0)


def test_reductions_of_bool_are_or_and_and():
    assert [checks.check_reduce_op(op, "bool") for op in ("sum", "max", "bor")] == ["max"] * 3
    assert [checks.check_reduce_op(op, "bool") for op in ("prod", "min", "band")] == ["min"] * 3
    with pytest.raises(ValueError, match="'avg' is not defined on bool"):
        checks.check_reduce_op("avg", "bool")
    assert checks.check_reduce_op("avg", "int64") == "avg"


def test_dtypes_with_long_names_differ_and_are_shown_whole():
    names = [np.dtype(kind).name for kind in (ml_dtypes.float8_e4m3b11fnuz, "m8[100ns]")]
    names += ["float8_e4m3b11fn", "float8_e4m3fnuz"]
    calls = [encode_call("broadcast", "", name, 0, (3,)) for name in names]
    assert len(set(calls)) == len(names)
    assert [describe_call(call) for call in calls] == [f"broadcast(root 0) {n}[3]" for n in names]


def test_a_name_that_does_not_fit_is_cut_but_stays_itself():
    long = ["x" * 40, "x" * 41, "x" * 40 + "y"]
    seen = [encode_dtype(name, 24) for name in long]
    assert len(set(seen)) == 3
    assert {len(one) for one in seen} == {24}
    assert encode_dtype("float32", 16) == b"float32"


def test_splits_are_part_of_a_call_and_are_shown():
    few = [encode_call("all_gather", "", "int8", -1, (6, 2), splits=s) for s in ((1, 5), (2, 4))]
    assert few[0] != few[1]
    assert describe_call(few[0]) == "all_gather(splits [1, 5]) int8[6, 2]"
    many = [
        encode_call("all_gather", "", "int8", -1, (90,), splits=(1,) * 89 + (last,))
        for last in (1, 2)
    ]
    assert many[0] != many[1]
    assert describe_call(many[0]).startswith("all_gather(90 splits, checksum ")
    assert len(many[0]) == CALL_BYTES


@pytest.mark.parametrize("given", [2, 2.0, np.float32(2), np.int64(2), timedelta(seconds=2)])
def test_a_timeout_is_a_number_of_seconds_or_a_timedelta(given):
    assert checks.check_timeout(given) == checks.check_wait(given) == 2.0


@pytest.mark.parametrize("given", [-1, "2", True, math.nan, timedelta(seconds=-2)])
def test_other_timeouts_are_refused(given):
    for check in (checks.check_timeout, checks.check_wait):
        with pytest.raises(ValueError, match="timeout_s must be"):
            check(given)


def test_an_infinite_timeout_fits_the_clocks_of_libraries():
    assert checks.check_timeout(math.inf) == checks.check_wait(math.inf) == 1e9


def test_a_group_has_a_list_of_ranks_and_a_text_as_its_name():
    assert checks.check_ranks(range(2), 2) == (0, 1)
    assert [checks.check_name(name) for name in (None, "dp")] == [None, "dp"]
    with pytest.raises(TypeError, match="ranks must be a list of ranks, got 0"):
        checks.check_ranks(0, 2)
    with pytest.raises(TypeError, match="name must be a str, got 5"):
        checks.check_name(5)
