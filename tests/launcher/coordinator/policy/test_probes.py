"""Which probes a failure asks for, and what follows where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launcher.coordinator.policy import probes
from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.table import TABLE


@pytest.mark.parametrize(
    ("cause", "is_outside", "asked"),
    [
        ("out_of_memory", False, ("memory",)),
        ("dead_process", False, ("memory", "device")),
        ("network", False, ("network",)),
        ("storage_stall", False, ("storage",)),
        ("exception", False, ()),
        ("exception", True, ("storage", "network")),
        ("skipped_collective", False, ()),
        ("unknown", False, ()),
    ],
)
def test_a_cause_asks_for_its_probes(cause, is_outside, asked):
    assert probes.probes_for(Failure(attempt=0, cause=cause, is_outside=is_outside)) == asked


def test_each_cause_is_known_to_the_policy_and_each_probe_has_an_answer():
    known = {cause for row in TABLE for cause in row.causes}
    for row in probes.ASKED:
        assert set(row.causes) <= known
        for probe in row.probes:
            assert probes.tries_of(probe) >= 1


def test_waits_double_up_to_a_minute():
    waits = [probes.wait_s(number) for number in (1, 2, 3, 6, 7, 8, 99)]
    assert waits == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0, 60.0]


def test_the_page_shows_both_tables():
    page = (Path(__file__).parents[4] / "docs" / "restarts.md").read_text()
    for table in probes.to_markdown().split("\n\n"):
        assert table.strip() in page
