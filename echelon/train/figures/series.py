"""Read a run's figures as series, and smooth noisy figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """The log of one run, read from its file.

    Attributes:
        name: the run's label in the plot.
        path: the path of the log.
        lines: the lines of the log in order, one per step or note.
    """

    name: str
    path: Path
    lines: Sequence[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a given figure, in order, and the figure's values.

        If a step has several values, the last value is used. A value that was not finite is
        returned as NaN, which leaves a gap in the plot.
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
    """Replace each value with the median of the `width` values around it; NaN stays NaN.

    The windows of the first values are narrower, to preserve the start of a steeply falling series.
    """
    out = []
    for i, value in enumerate(values):
        half = min(width // 2, i)
        near = sorted(v for v in values[i - half : i + half + 1] if not math.isnan(v))
        out.append(math.nan if math.isnan(value) else near[len(near) // 2])
    return out


def width_for(number: int) -> int:
    """Return the window width for smoothing `number` values: about `number` / 25, at least 1."""
    return number // 50 * 2 + 1 if number >= 50 else 1
