"""The factor of the learning rate at every step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from echelon.train.schedules import (
    Constant,
    Cosine,
    WarmupStableDecay,
    make_schedule,
    set_learning_rate,
)

_RUNS = [
    Cosine(num_steps=40, num_warmup=7, floor=0.1),
    Cosine(num_steps=40, num_warmup=40, floor=0.1),
    WarmupStableDecay(num_steps=40, num_warmup=7, num_decay=10, floor=0.05),
    WarmupStableDecay(num_steps=40, num_warmup=30, num_decay=10, shape="sqrt"),
    WarmupStableDecay(num_steps=3, num_warmup=3, shape="cosine"),
    WarmupStableDecay(num_steps=1),
    Cosine(num_steps=1),
]


@pytest.mark.parametrize("schedule", _RUNS, ids=repr)
def test_a_schedule_rises_then_never_rises_again_and_ends_at_its_floor(schedule):
    factors = [schedule(step) for step in range(60)]
    top = schedule.num_warmup
    rise = factors[:top]
    assert rise == [(step + 1) / top for step in range(top)]
    fall = factors[top : schedule.num_steps]
    assert fall == sorted(fall, reverse=True)
    assert all(schedule.floor <= factor <= 1.0 for factor in fall)
    assert set(factors[schedule.num_steps :]) == {schedule.floor}
    if fall:
        assert fall[0] == 1.0


def test_a_cosine_is_halfway_down_in_the_middle():
    schedule = Cosine(num_steps=110, num_warmup=10, floor=0.2)
    assert math.isclose(schedule(60), 0.6)
    assert math.isclose(schedule(35), 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_stable_means_one_until_the_fall_begins():
    schedule = WarmupStableDecay(num_steps=100, num_warmup=10, num_decay=20)
    assert {schedule(step) for step in range(9, 81)} == {1.0}
    assert math.isclose(schedule(90), 0.5)
    assert math.isclose(schedule(99), 0.05)
    root = WarmupStableDecay(num_steps=100, num_decay=20, shape="sqrt")
    assert math.isclose(root(85), 0.5)


def test_runs_of_other_lengths_agree_until_the_first_one_falls():
    short = WarmupStableDecay(num_steps=100, num_warmup=10, num_decay=20)
    long = WarmupStableDecay(num_steps=1000, num_warmup=10, num_decay=20)
    assert [short(step) for step in range(81)] == [long(step) for step in range(81)]


def test_without_a_number_the_fall_takes_a_tenth_of_the_run():
    schedule = WarmupStableDecay(num_steps=100)
    assert schedule(90) == 1.0
    assert schedule(91) < 1.0


def test_a_constant_stays_at_one():
    assert [Constant(num_warmup=4)(step) for step in (0, 3, 4, 10**9)] == [0.25, 1, 1, 1]
    assert Constant()(0) == 1.0


def test_schedules_are_made_by_name():
    assert make_schedule("cosine", num_steps=9) == Cosine(num_steps=9)
    assert make_schedule("wsd", num_steps=9, shape="sqrt").shape == "sqrt"
    assert make_schedule("constant") == Constant()
    with pytest.raises(ValueError, match="one of constant, cosine, wsd, got 'step'"):
        make_schedule("step")
    with pytest.raises(TypeError, match="num_decay"):
        make_schedule("cosine", num_steps=9, num_decay=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(num_steps=0), "num_steps must be an int >= 1, got 0"),
        (lambda: Cosine(num_steps=True), "num_steps"),
        (lambda: Cosine(num_steps=5.0), "num_steps"),
        (
            lambda: Cosine(num_steps=5, num_warmup=6),
            "num_warmup must be at most num_steps .5., got 6",
        ),
        (lambda: Cosine(num_steps=5, num_warmup=-1), "num_warmup"),
        (lambda: Cosine(num_steps=5, floor=1.5), "floor"),
        (lambda: Cosine(num_steps=5, floor=math.nan), "floor"),
        (lambda: Cosine(num_steps=5, floor="low"), "floor"),
        (lambda: WarmupStableDecay(num_steps=5, num_decay=0), "num_decay must be an int >= 1"),
        (
            lambda: WarmupStableDecay(num_steps=5, num_warmup=3, num_decay=3),
            "num_decay must be at most num_steps .5., got 6",
        ),
        (lambda: WarmupStableDecay(num_steps=5, shape="steep"), "shape must be one of linear"),
        (lambda: Constant(num_warmup=-2), "num_warmup"),
        (lambda: Constant()(-1), "step must be an int >= 0, got -1"),
        (lambda: Cosine(num_steps=3)(1.5), "step"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_group_keeps_its_own_peak():
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 2.0}])
    assert set_learning_rate(optimizer, 0.5) == 0.25
    assert set_learning_rate(optimizer, 0.1) == 0.05
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.2]
    with pytest.raises(ValueError, match="factor"):
        set_learning_rate(optimizer, math.nan)
    with pytest.raises(ValueError, match="no parameter groups"):
        set_learning_rate(SimpleNamespace(param_groups=[]), 1.0)
