"""When a checkpoint is due, the same on all ranks though their clocks differ."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import echelon.dist as dist
from echelon.dist.checkpoint import SaveSchedule
from tests.support.ranks import run_ranks


class Clock:
    def __init__(self, rate):
        self.now_s, self.rate = 0.0, rate

    def __call__(self):
        return self.now_s

    def tick(self):
        self.now_s += self.rate


def due_steps(schedule, clock, last):
    steps = []
    for step in range(1, last + 1):
        clock.tick()
        if schedule.due(step):
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every_steps": 4}, [4, 8, 12]),
        ({"every_s": 5.0}, [5, 10]),
        ({"every_s": 5.0, "every_steps": 7}, [5, 7, 12]),
        ({"every_s": 0.5}, list(range(1, 13))),
    ],
)
def test_steps_and_seconds_whichever_is_first(settings, steps):
    clock = Clock(1.0)
    assert due_steps(SaveSchedule(**settings, now=clock), clock, 12) == steps


@pytest.mark.parametrize("settings", [{}, {"every_steps": 0}, {"every_s": -1.0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match="every_"):
        SaveSchedule(**settings)


def _ranks(rank, world_size):
    world = dist.init(timeout_s=60.0)
    clock = Clock([1.0, 1000.0, 0.0][rank])  # rank 0's counts
    schedule = SaveSchedule(every_s=10.0, now=clock)
    steps = []
    for step in range(1, 101):
        clock.tick()
        if schedule.due(step):
            steps.append(step)
        if step % 10 == 0:
            world.barrier()
    dist.shutdown()
    return steps


@pytest.mark.ranks
def test_rank_0s_clock_decides_for_all_ranks_though_their_clocks_differ():
    first, *others = run_ranks(_ranks, 3)
    assert others == [first, first]
    assert 1 <= len(first) <= 10
    assert first[0] >= 10
    assert all(b - a >= 10 for a, b in itertools.pairwise(first))
