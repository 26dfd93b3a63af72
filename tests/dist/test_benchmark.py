"""The benchmark of collectives measures right results only, and does not wait for a dead rank."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.collectives import rank as rank_script
from benchmarks.collectives import run


class _Alone:
    """A group of one that adds, or one that forgets to."""

    def __init__(self, off_by=0):
        self._off_by = off_by

    def all_reduce(self, x, op):
        x += self._off_by

    def barrier(self):
        pass


def test_a_wrong_result_is_an_error_and_no_sample():
    for group, is_right in ((_Alone(), True), (_Alone(off_by=1), False)):
        case = rank_script.Cases(group, 0, 1, 64, "float32").make("all_reduce")
        if is_right:
            assert rank_script.measure(case, group.barrier, 3) > 0
        else:
            with pytest.raises(AssertionError, match="16 of 16 wrong"):
                rank_script.measure(case, group.barrier, 3)


@pytest.mark.parametrize("operation", rank_script.OPERATIONS)
def test_every_case_tells_a_missing_result(operation):
    """A library that does nothing at all is found out."""

    class Nothing:
        def __getattr__(self, name):
            return lambda *_: None

    rank = 0 if "max" in operation else 1  # one that must get something from the other
    case = rank_script.Cases(Nothing(), rank, 2, 256, "float64").make(operation)
    with pytest.raises(AssertionError, match="wrong"):
        rank_script.measure(case, lambda: None, 1)


def test_numbers_stay_exact_in_the_smallest_dtype():
    import ml_dtypes

    cases = rank_script.Cases(None, 3, 8, 1024, "bfloat16")
    largest = (cases._numbers.astype(np.float64) + 7).max() * 8
    assert float(np.dtype(ml_dtypes.bfloat16).type(largest)) == largest


def test_a_rank_that_ends_is_reported():
    job = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit(7)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    rank = run.Rank("mine rank 0", job, job.stdin.fileno(), job.stdout.fileno())
    with pytest.raises(RuntimeError, match="mine rank 0 ended with exit code 7"):
        rank.hear(20.0)
    job.stdin.close()
    job.stdout.close()


def test_rows_that_are_slower_than_before_are_listed():
    samples = {"native": [1.2, 1.0, 1.3], "native before": [1.0, 1.0, 1.0], "gloo": [9.0] * 3}
    row = {"ranks": 2, "operation": "barrier", "dtype": "float32", "num_bytes": 4}
    row["against"] = run.against(samples)
    assert row["against"] == {"native": pytest.approx(1.2)}
    assert "native takes 1.20 of before" in run.summary([row])[0]
    row["against"] = {"native": 0.9}
    assert run.summary([row]) == ["no row of 1 takes more than 1.05 of before"]
