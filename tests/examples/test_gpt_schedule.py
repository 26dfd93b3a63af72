"""The learning rate over a run."""

from __future__ import annotations

import pytest
from gpt.training.schedule import FLOOR, learning_rate


def rates(num_warmup: int, num_steps: int) -> list[float]:
    return [
        learning_rate(step, peak=2.0, num_warmup=num_warmup, num_steps=num_steps)
        for step in range(num_steps)
    ]


def test_warm_up_rises_linearly_to_the_peak():
    assert rates(4, 100)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_the_cosine_falls_to_the_floor():
    after_warmup = rates(10, 110)[10:]
    assert after_warmup == sorted(after_warmup, reverse=True)
    assert after_warmup[50] == pytest.approx(2.0 * (1 + FLOOR) / 2)
    assert learning_rate(110, peak=2.0, num_warmup=10, num_steps=110) == pytest.approx(2.0 * FLOOR)


@pytest.mark.parametrize(("num_warmup", "num_steps"), [(0, 1), (0, 5), (5, 5), (10, 5)])
def test_short_runs_have_a_rate_too(num_warmup, num_steps):
    assert all(0 < rate <= 2.0 for rate in rates(num_warmup, num_steps))


def test_training_beyond_the_planned_end_stays_at_the_floor():
    assert learning_rate(500, peak=2.0, num_warmup=1, num_steps=100) == pytest.approx(2.0 * FLOOR)
