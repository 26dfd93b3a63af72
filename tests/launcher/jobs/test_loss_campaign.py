"""Launched trainings that lose ranks at random moments, by the benchmark's campaign. Slow."""

from __future__ import annotations

import pytest

from benchmarks.losses.job import reference, train
from benchmarks.losses.plan import HOST, HOSTS, plan_of
from tests.support.hosts import needs_hosts

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.mark.parametrize(
    ("layout", "number"),
    [(HOST, 0), (HOST, 1), (HOST, 2), pytest.param(HOSTS, 3, marks=needs_hosts)],
)
def test_the_bits_are_those_of_an_undisturbed_run_whatever_is_lost(tmp_path, layout, number):
    plan = plan_of(layout, number)
    record = train(plan, tmp_path / "training")
    assert "failed" not in record, record
    assert record["bits"] == [reference(tmp_path / "reference")]
    assert len(record["losses"]) == len(plan.faults), "a loss did not occur"
