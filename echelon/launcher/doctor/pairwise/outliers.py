"""Find the members and pairs that are slower than the rest.

An outlier exceeds the median by a factor of more than 1.5, and also by more than five standard
deviations, which are estimated as 1.4826 times the median absolute deviation (MAD). Without the
factor of 1.5, healthy links would count as outliers if all values were nearly equal.

First, each member is judged by its best pair, because a slow host is slow with every other host.
Then the pairs of the remaining members are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TypeVar

from echelon.launcher.doctor.pairwise.schedule import Pair

NUM_DEVIATIONS = 5.0
FACTOR = 1.5
_SCALE = 1.4826  # from the MAD of a normal distribution to its standard deviation
_LEAST = 3  # with two values, neither is the unusual one

K = TypeVar("K")


def outliers(values: Mapping[K, float]) -> list[K]:
    """Return the keys of the values that are unusually large, worst first."""
    if len(values) < _LEAST:
        return []
    middle = median(values.values())
    deviation = _SCALE * median(abs(value - middle) for value in values.values())
    limit = max(middle + NUM_DEVIATIONS * deviation, FACTOR * middle)
    found = [key for key, value in values.items() if value > limit]
    return sorted(found, key=lambda key: -values[key])


def slow_ones(costs: Mapping[Pair, float]) -> tuple[list[int], list[Pair]]:
    """Return the slow members, and the slow pairs of the remaining members.

    Args:
        costs: the cost of each measured pair; larger is worse.
    """
    members = outliers(best_of(costs))
    rest = {pair: cost for pair, cost in costs.items() if not set(pair) & set(members)}
    return members, outliers(rest)


def best_of(costs: Mapping[Pair, float]) -> dict[int, float]:
    """Return, for each member, the lowest cost among the pairs to which it belongs."""
    best: dict[int, float] = {}
    for pair, cost in costs.items():
        for member in pair:
            best[member] = min(cost, best.get(member, cost))
    return best
