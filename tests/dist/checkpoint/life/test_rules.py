"""Which checkpoint is the newest and which may go, by rule alone."""

from __future__ import annotations

import math

import pytest

from echelon.dist.checkpoint.life.rules import (
    Condition,
    Found,
    Policy,
    best,
    for_room,
    newest,
    superfluous,
)


def whole(*steps, scores=None):
    return [Found(step=step, score=(scores or {}).get(step)) for step in steps]


def bad(step, condition=Condition.DAMAGED):
    return Found(step=step, condition=condition)


def test_the_newest_is_the_complete_one_of_the_highest_step():
    found = [*whole(200, 9, 100), bad(300), bad(400, Condition.UNFINISHED)]
    assert newest(found).step == 200
    assert newest([bad(300)]) is None


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (Policy(keep=1), [100, 200, 300, 400]),
        (Policy(keep=3), [100, 200]),
        (Policy(keep=9), []),
        (Policy(keep=1, keep_every=200), [100, 300]),
        (Policy(keep=1, best="lowest"), [100, 300, 400]),
        (Policy(keep=1, best="highest"), [200, 300, 400]),
        (Policy(keep=2, keep_every=300, best="highest"), [200]),
    ],
)
def test_the_last_every_kth_and_the_best_stay(policy, gone):
    found = whole(100, 200, 300, 400, 500, scores={100: 3.0, 200: 1.0, 300: 2.0, 400: math.nan})
    assert superfluous(found, policy, 500) == gone


def test_unfinished_ones_go_and_damaged_ones_do_not_count():
    found = [bad(100), *whole(200, 300), bad(350), *whole(400), bad(450, Condition.UNFINISHED)]
    assert superfluous(found, Policy(keep=2), 400) == [100, 200, 450]


def test_nothing_goes_if_what_was_saved_is_not_there():
    assert superfluous(whole(100, 200, 300), Policy(keep=1), 400) == []


def test_what_was_just_saved_stays_though_later_steps_are_there():
    assert superfluous(whole(100, 500, 600, 700), Policy(keep=2), 100) == [500]


def test_equal_scores_keep_the_earliest():
    assert best(whole(1, 2, scores={1: 0.5, 2: 0.5}), "highest").step == 1
    assert best(whole(1, 2), "lowest") is None


def test_for_room_the_newest_and_the_best_never_go_and_milestones_go_last():
    found = [*whole(100, 200, 300, 400, 500, scores={300: 1.0}), bad(250)]
    policy = Policy(keep=3, keep_every=200, best="lowest")
    assert for_room(found, policy) == [250, 100, 200, 400]
    assert for_room(whole(7), Policy()) == []
