"""Measure cases in rounds: all sides of all cases in turn, in an order drawn for every round.

Whatever else the machine does then hits every side alike, and no side is always the first, which
finds caches cold, or the last.
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
    """One thing that is measured on several sides.

    Attributes:
        name: of the row.
        sides: what to call for each; a mapping's figures become series of their own.
        rounds: at most so many of this case; None: as many as are asked for.
        side_rounds: the same of one side.
    """

    name: str
    sides: Mapping[str, Measure]
    rounds: int | None = None
    side_rounds: Mapping[str, int] = field(default_factory=dict)

    def num_rounds(self, side: str, asked: int) -> int:
        """Return in how many rounds a side takes part."""
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
        cases: what; their names differ.
        num_rounds: how often.
        seed: of the order; None: another one in each run.
        limit_s: begin no further round after so long, once `least_rounds` are done.
        least_rounds: see `limit_s`.

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
    """Return median and quartiles as text; of fewer than three values the median alone."""
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def fastest_tenth(values: Sequence[float]) -> float:
    """Return what the fastest tenth stays below: other work only ever adds to a cost."""
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def ratio(ours: Sequence[float], peer: Sequence[float], *, higher_is_better: bool) -> float:
    """Return how many times as good our median is as the peer's: above 1 is better."""
    mine, other = statistics.median(ours), statistics.median(peer)
    return mine / other if higher_is_better else other / mine
