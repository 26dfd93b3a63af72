"""Measure cases in rounds: all sides of all cases in turn, in a random order per round.

Other work on the machine then affects all sides equally, and no side is always the first, with cold
caches, or the last.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Figures = Mapping[str, float]
Measure = Callable[[int], "float | Figures"]  # takes the round's number
Samples = dict[str, list[float]]  # of one case: by side, or "SIDE FIGURE" where it has several


@dataclass(frozen=True, kw_only=True)
class Case:
    """A quantity to measure on several sides.

    Attributes:
        name: the row's name.
        sides: the function that measures each side. If it returns a mapping, each figure becomes a
            series of its own.
        rounds: the maximum number of rounds of this case; None: no limit.
        side_rounds: the maximum number of rounds of individual sides.
    """

    name: str
    sides: Mapping[str, Measure]
    rounds: int | None = None
    side_rounds: Mapping[str, int] = field(default_factory=dict)

    def num_rounds(self, side: str, asked: int) -> int:
        """Return the number of rounds that include a side."""
        limits = (asked, self.rounds, self.side_rounds.get(side))
        return min(limit for limit in limits if limit is not None)


def measure(
    cases: Sequence[Case],
    num_rounds: int,
    *,
    seed: int | None = None,
    limit_s: float | None = None,
    least_rounds: int = 1,
) -> dict[str, Samples]:
    """Measure all sides of all cases.

    Args:
        cases: the cases, with distinct names.
        num_rounds: the number of rounds.
        seed: the seed of the order; None: a different order in each run.
        limit_s: the time after which no further round begins, once `least_rounds` are done.
        least_rounds: the minimum number of rounds; see `limit_s`.

    Returns:
        The samples of each case that was measured, in the order of `cases`.
    """
    order = random.Random(seed)
    found: dict[str, Samples] = {case.name: {} for case in cases}
    began_s = time.monotonic()
    for number in range(num_rounds):
        is_late = limit_s is not None and time.monotonic() - began_s > limit_s
        if is_late and number >= least_rounds:
            break
        turns = [
            (case, side)
            for case in cases
            for side in case.sides
            if number < case.num_rounds(side, num_rounds)
        ]
        for case, side in order.sample(turns, len(turns)):
            _add(found[case.name], side, case.sides[side](number))
        print(f"round {number + 1} of {num_rounds} done", file=sys.stderr, flush=True)
    return {name: samples for name, samples in found.items() if samples}


def _add(samples: Samples, side: str, figure: float | Figures) -> None:
    if isinstance(figure, Mapping):
        for name, value in figure.items():
            samples.setdefault(f"{side} {name}".strip(), []).append(value)
    else:
        samples.setdefault(side, []).append(figure)


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median and quartiles; of fewer than three values, only the median."""
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def fastest_tenth(values: Sequence[float]) -> float:
    """Return the first decile, which is robust because other work can only add to a cost."""
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def ratio(ours: Sequence[float], peer: Sequence[float], *, higher_is_better: bool) -> float:
    """Return how many times better echelon's median is than the peer's; above 1 is better."""
    mine, other = statistics.median(ours), statistics.median(peer)
    return mine / other if higher_is_better else other / mine
