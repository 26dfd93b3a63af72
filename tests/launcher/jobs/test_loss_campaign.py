"""Launched trainings that lose ranks at random moments, by the benchmark's campaign. Slow."""

from __future__ import annotations

import pytest

from benchmarks.losses.run import campaign

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def test_the_bits_are_those_of_an_undisturbed_run_whatever_is_killed_or_stopped(tmp_path):
    found = campaign(tmp_path, 1, 6)
    assert len(found) >= 6
    assert {how for how, _ in found} == {"kill", "stop"}
