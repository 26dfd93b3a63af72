"""The order of samples: permutations that are ones, and weights that are kept exactly."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.tokens.mixture import Mixture
from echelon.tokens.permutation import permute


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 65_537])
def test_each_thing_comes_once(size):
    order = permute(np.arange(size), size, (1, 2, 3))
    assert sorted(order.tolist()) == list(range(size))


def test_one_index_at_a_time_gives_the_same_as_all_at_once():
    together = permute(np.arange(1000), 1000, (4, 5, 6))
    assert [int(permute(np.array([i]), 1000, (4, 5, 6))[0]) for i in range(50)] == together[
        :50
    ].tolist()


def test_the_order_of_large_sources_is_fixed_for_all_versions():
    """A saved position belongs to this order: it may never change."""
    assert permute(np.arange(4), 10**9, (0, 1, 2)).tolist() == [
        512742787,
        561127867,
        672702422,
        432027417,
    ]


@pytest.mark.parametrize("other", [(8, 2, 3), (1, 8, 3), (1, 2, 8), (-1, 2, 3), (1 << 70, 2, 3)])
def test_each_part_of_the_key_counts(other):
    first, second = (permute(np.arange(10_000), 10_000, key) for key in ((1, 2, 3), other))
    assert (first == second).sum() < 20  # one is expected of two random orders


@pytest.mark.parametrize("size", [1000, 4096, 10_007, 65_536])
def test_the_order_looks_random(size):
    """Neighbors, places and halves are uncorrelated; bounds are about five standard deviations."""
    order = permute(np.arange(size), size, (7, 7, 7)).astype(float)
    bound = 5 / np.sqrt(size)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < bound
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
    in_low_half = order[: size // 2] < size / 2
    assert abs(in_low_half.mean() - 0.5) < bound


def test_weights_are_kept_to_the_sample():
    weights = [0.5, 0.3, 0.2]
    mixture = Mixture(weights)
    drawn = np.concatenate([mixture.draw(num).source for num in (1, 2, 7, 90, 900)])
    for end in range(1, len(drawn) + 1):
        counts = np.bincount(drawn[:end], minlength=3)
        assert np.abs(counts - np.array(weights) * end).max() < 2, end
    assert np.bincount(drawn).tolist() == [500, 300, 200]
    assert mixture.taken == [500, 300, 200]


def test_the_numbers_of_a_source_have_no_gap():
    drawn = Mixture([3, 1]).draw(100)
    for source in (0, 1):
        numbers = drawn.number[drawn.source == source]
        assert numbers.tolist() == list(range(len(numbers)))


def test_a_source_without_weight_is_never_drawn():
    assert set(Mixture([0, 1, 0]).draw(50).source.tolist()) == {1}


@pytest.mark.parametrize("weights", [[], [0, 0]])
def test_some_source_has_a_weight(weights):
    with pytest.raises(ValueError, match="at least one source must have a weight"):
        Mixture(weights)
