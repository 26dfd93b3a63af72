"""A run's figures as series, and the smoothing that makes noisy ones readable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A log that was read.

    Attributes:
        name: label in the plot.
        path: of the log.
        lines: one per step or note, in order.
    """

    name: str
    path: Path
    lines: Sequence[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a figure, in order, and the figure.

        If a step has several values, the last one counts. A value that was not finite is NaN, a
        gap.
        """
        found: dict[int, float] = {}
        for line in self.lines:
            value = line.get(name, math.nan if name in line.get("not_finite", ()) else None)
            if value is None and name in line:
                value = math.nan
            if isinstance(value, int | float):
                found[line["step"]] = float(value)
        steps = sorted(found)
        return steps, [found[step] for step in steps]


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return the median of each value's neighbourhood of `width` values; NaN stays NaN.

    The first values have smaller neighbourhoods, so that a steeply falling series keeps its start.
    """
    out = []
    for i, value in enumerate(values):
        half = min(width // 2, i)
        near = sorted(v for v in values[i - half : i + half + 1] if not math.isnan(v))
        out.append(math.nan if math.isnan(value) else near[len(near) // 2])
    return out


def width_for(number: int) -> int:
    """Return how many values of a series are smoothed together: about a twenty-fifth, or none."""
    return number // 50 * 2 + 1 if number >= 50 else 1
