"""The clock that stops while its process does not run."""

from __future__ import annotations

import pytest

from echelon.launcher.control.lived import LivedTime


def test_a_process_that_runs_lives_through_all_time():
    lived = LivedTime(1.0, 100.0)
    for tick in range(1, 50):
        lived.tick(100 + 0.7 * tick)
    assert lived.since(100.0, 100 + 0.7 * 49) == pytest.approx(0.7 * 49)


def test_a_standstill_counts_for_one_step():
    lived = LivedTime(0.5, 0.0)
    lived.tick(0.5)
    assert lived.since(0.2, 30.0) == pytest.approx(0.8), "it has not noticed yet"
    lived.tick(30.0)
    assert lived.since(0.2, 30.0) == pytest.approx(0.8)
    assert lived.since(0.2, 30.4) == pytest.approx(1.2)
    assert lived.since(30.1, 30.4) == pytest.approx(0.3)


def test_the_past_is_known_over_many_standstills():
    lived = LivedTime(1.0, 0.0)
    for second in range(10, 2000, 10):  # it runs one second of ten
        lived.tick(float(second))
    assert lived.since(1800.0, 1990.0) == pytest.approx(19.0)
    assert lived.since(1805.0, 1990.0) == pytest.approx(18.0), "a moment within a standstill"
    assert lived.since(0.5, 1990.0) >= 1000, "what is long past counts as lived through"
