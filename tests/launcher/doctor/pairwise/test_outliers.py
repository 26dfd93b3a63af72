"""Which links and hosts are called slow."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from echelon.launcher.doctor.pairwise.outliers import outliers, slow_ones


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], []),
        ([1.0, 100.0], []),  # of two neither is the odd one
        ([1.0, 1.0, 1.0, 1.4], []),  # equal values have no deviation: a factor is asked for, too
        ([1.0, 1.0, 1.0, 1.6], [3]),
        ([1.0, 1.1, 0.9, 5.0, 50.0], [4, 3]),  # worst first
        ([1.0, 2.0, 3.0, 4.0, 5.0], []),  # spread, and no outlier
        ([1.0, 1.0, 1.0, 0.01], []),  # a fast one is none
    ],
)
def test_a_value_far_above_the_median_is_an_outlier(values, found):
    assert outliers(dict(enumerate(values))) == found


def test_healthy_links_with_noise_are_not_accused():
    dice = random.Random(3)
    for _ in range(200):
        values = {n: 100.0 * dice.uniform(0.85, 1.15) for n in range(dice.randint(3, 60))}
        assert outliers(values) == []


def _costs(num_members, slow_members=(), slow_pairs=()):
    dice = random.Random(num_members)
    return {
        pair: dice.uniform(0.9, 1.1)
        * (20 if set(pair) & set(slow_members) or pair in slow_pairs else 1)
        for pair in combinations(range(num_members), 2)
    }


@pytest.mark.parametrize("number", [3, 4, 5, 8, 17])
def test_a_slow_host_is_named_and_not_its_pairs(number):
    assert slow_ones(_costs(number, slow_members=[1])) == ([1], [])


@pytest.mark.parametrize("number", [3, 4, 5, 8, 17])
def test_a_slow_link_is_named_and_not_its_hosts(number):
    assert slow_ones(_costs(number, slow_pairs=[(0, 2)])) == ([], [(0, 2)])


def test_a_slow_host_and_a_slow_link_elsewhere_are_told_apart():
    assert slow_ones(_costs(6, [5], [(0, 1)])) == ([5], [(0, 1)])
