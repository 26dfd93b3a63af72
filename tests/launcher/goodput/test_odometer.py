"""Laps from live words: every step is counted once, and the spent times add up."""

from __future__ import annotations

import random

from echelon.launcher.goodput.facts import Lap, RankRun, Spent
from echelon.launcher.goodput.odometer import Odometer
from echelon.recorder.format.schema import Live


def _words(step, at_ns, spent=(0, 0, 0), first=(0, 100)):
    words = [0] * Live.NUM_WORDS
    words[Live.STEP], words[Live.STEP_MONO_NS] = step + 1, at_ns
    words[Live.FIRST_STEP], words[Live.FIRST_STEP_MONO_NS] = first[0] + 1, first[1]
    words[Live.WAITED_NS], words[Live.CHECKPOINT_NS], words[Live.DATA_NS] = spent
    return words


def test_no_step_is_no_lap():
    odometer = Odometer()
    assert odometer.read([0] * Live.NUM_WORDS) == []
    assert odometer.step == -1


def test_the_first_step_is_known_before_it_has_ended():
    (lap,) = Odometer().read(_words(0, 100))
    assert (lap.first_step, lap.end_step, lap.began_ns, lap.ended_ns) == (0, 0, 100, 100)


def test_what_an_unfinished_step_has_spent_is_known_after_an_orderly_end():
    odometer = Odometer()
    odometer.read(_words(3, 400, (10, 0, 0)))
    assert odometer.read(_words(3, 400, (15, 7, 0))) == []
    assert odometer.unfinished == Spent(waited_ns=5, checkpoint_ns=7)


def test_looks_at_any_moment_count_each_step_once():
    random_ = random.Random(7)
    odometer, laps, at, spent = Odometer(), [], 100, (0, 0, 0)
    laps += odometer.read(_words(0, 100))
    for step in range(1, 200):
        at += random_.randint(1, 50)
        spent = tuple(one + random_.randint(0, 5) for one in spent)
        if random_.random() < 0.3 or step == 199:
            laps += odometer.read(_words(step, at, spent))
    assert [lap.first_step for lap in laps[1:]] == [lap.end_step for lap in laps[:-1]]
    assert (laps[0].began_ns, laps[-1].end_step, laps[-1].ended_ns) == (100, 199, at)
    assert sum(lap.spent.waited_ns for lap in laps) == spent[0]
    assert sum(lap.spent.data_ns for lap in laps) == spent[2]


def test_the_next_program_of_a_rank_begins_again():
    odometer = Odometer()
    odometer.read(_words(5, 600, (50, 0, 0)))
    laps = odometer.read(_words(2, 1200, (4, 0, 0), first=(0, 1000)))
    assert [(lap.first_step, lap.end_step, lap.began_ns, lap.ended_ns) for lap in laps] == [
        (0, 0, 1000, 1000),
        (0, 2, 1000, 1200),
    ]
    assert laps[-1].spent.waited_ns == 4


def test_laps_beyond_the_limit_become_longer_and_lose_nothing():
    run = RankRun(host="a")
    for step in range(1000):
        lap = Lap(
            first_step=step, end_step=step + 1, began_ns=10 * step, ended_ns=10 * step + 10,
            spent=Spent(waited_ns=1),
        )  # fmt: skip
        run.add(lap, 16)
    assert len(run.laps) <= 16
    assert (run.laps[0].first_step, run.laps[-1].end_step) == (0, 1000)
    assert sum(lap.spent.waited_ns for lap in run.laps) == 1000
    assert all(a.ended_ns == b.began_ns for a, b in zip(run.laps, run.laps[1:], strict=False))
