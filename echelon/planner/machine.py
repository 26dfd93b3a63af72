"""Describe the speeds of ranks and links, which are measured, stated by the user, or assumed.

A link is described by its latency and bandwidth (Hockney's model). Sending S bytes takes
latency + S / bandwidth. The bandwidth is the number of bytes that a rank sends per second while all
groups of the same kind are active. A ring all_reduce of S bytes over n ranks therefore takes
2 (n - 1) (latency + S / n / bandwidth).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FORMAT = 1
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Figure:
    """A likely value and two bounds; about 90% of random draws lie between the bounds."""

    likely: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check that `low`, `likely` and `high` are in ascending order.

        Raises:
            ValueError: the numbers are negative, not finite or not in ascending order.
        """
        numbers = (self.low, self.likely, self.high)
        if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
            raise ValueError(f"expected three finite, non-negative numbers, got {numbers}")
        if not self.low <= self.likely <= self.high:
            raise ValueError(f"low, likely and high must be in ascending order, got {numbers}")

    @classmethod
    def about(cls, likely: float, factor: float) -> Figure:
        """Return a figure whose bounds are `likely / factor` and `likely * factor`."""
        return cls(likely, likely / factor, likely * factor)

    def draw(self, random: random.Random) -> float:
        """Draw a value from a clamped log-normal distribution (triangular if `low` is 0)."""
        if self.low <= 0:
            return random.triangular(self.low, self.high, self.likely)
        deviate = random.gauss(0.0, 1 / 1.645)  # 90 % within the bounds
        far = self.high if deviate > 0 else self.low
        away = abs(math.log(far / self.likely)) if far > 0 else 0.0
        return self.likely * math.exp(math.copysign(away, deviate) * min(abs(deviate), 3.0))


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of the links that groups of a given size use, inside a node or across nodes."""

    size: int
    is_across: bool
    latency_s: Figure
    bytes_per_s: Figure


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speed of one rank's computation and communication, with bounds for each figure.

    Attributes:
        flops_per_s: the floating-point operations per second that training sustains during
            computation.
        bytes_per_s: the bandwidth of a rank's memory, which limits the optimizer step.
        overlap: the fraction of communication that computation can hide, from 0 to 1.
        block_s: the time in seconds to launch a block's operations and hooks, regardless of their
            size.
        links: the known speeds of links, each for one group size, inside a node or across nodes.
        origins: how each figure was obtained: measured, stated or assumed.
    """

    flops_per_s: Figure
    bytes_per_s: Figure
    overlap: Figure
    block_s: Figure
    links: tuple[Link, ...]
    origins: Mapping[str, str] = field(default_factory=dict)

    def link(self, size: int, *, is_across: bool) -> Link:
        """Return the link whose group size is nearest to `size`, on a logarithmic scale.

        If there are no links of the requested kind (across nodes or within a node), the links of
        the other kind are considered.
        """
        known = [link for link in self.links if link.is_across == is_across] or list(self.links)
        return min(known, key=lambda link: abs(math.log(link.size / max(size, 1))))

    def drawn(self, random: random.Random) -> Machine:
        """Return a copy of this machine with each figure drawn at random from its distribution."""

        def one(figure: Figure) -> Figure:
            value = figure.draw(random)
            return Figure(value, value, value)

        return replace(
            self,
            flops_per_s=one(self.flops_per_s),
            bytes_per_s=one(self.bytes_per_s),
            overlap=one(self.overlap),
            block_s=one(self.block_s),
            links=tuple(
                replace(link, latency_s=one(link.latency_s), bytes_per_s=one(link.bytes_per_s))
                for link in self.links
            ),
        )


def assumed(*, is_half: bool) -> Machine:
    """Return the assumed speeds of H100 nodes with NVLink that are connected at 400 Gbit/s.

    `is_half` selects the H100's peak rate in bf16 instead of fp32.
    """
    peak = 989e12 if is_half else 67e12
    return Machine(
        flops_per_s=Figure(0.45 * peak, 0.3 * peak, 0.6 * peak),
        bytes_per_s=Figure.about(2e12, 1.5),
        overlap=Figure(0.8, 0.5, 1.0),
        block_s=Figure.about(300e-6, 2.0),
        links=(
            Link(8, False, Figure.about(15e-6, 2.0), Figure.about(300e9, 1.6)),
            Link(8, True, Figure.about(30e-6, 2.0), Figure.about(40e9, 1.8)),
        ),
        origins={"processors": "assumed: an H100", "links": "assumed: NVLink and 400 Gbit/s"},
    )


def with_peak(machine: Machine, tflops: float) -> Machine:
    """Return a copy of a machine, with a compute rate derived from the peak rate `tflops`.

    Training is assumed to reach 30 to 60 % of the peak rate.

    Raises:
        ValueError: the peak rate is not positive and finite.
    """
    if not (math.isfinite(tflops) and tflops > 0):
        raise ValueError(f"the peak rate must be finite and above 0 TFLOP/s, got {tflops}")
    peak = tflops * TERA
    return replace(
        machine,
        flops_per_s=Figure(0.45 * peak, 0.3 * peak, 0.6 * peak),
        origins={**machine.origins, "processors": f"stated: {tflops:g} TFLOP/s at their peak"},
    )


def read_machine(path: str | Path, base: Machine) -> Machine:
    """Read a file written by `python -m echelon.planner.measure`; take missing values from `base`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain valid measurements.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("echelon_links") != FORMAT:
            raise ValueError(f"the field 'echelon_links' must be {FORMAT}")
        links = tuple(_link(one) for one in content["links"])
        if not links:
            raise ValueError("the file contains no links")
        known = {
            name: _figure(content[name])
            for name in ("flops_per_s", "bytes_per_s", "overlap", "block_s")
            if name in content
        }
    except (KeyError, TypeError, ValueError) as err:
        raise ValueError(f"{path} is not a file of measured links: {err}") from err
    origins = {**base.origins, "links": f"measured: {path}"}
    if "flops_per_s" in known:
        origins["processors"] = f"measured: {path}"
    return replace(base, links=links, origins=origins, **known)


def _figure(value: Any) -> Figure:
    return Figure(float(value["likely"]), float(value["low"]), float(value["high"]))


def _link(value: Any) -> Link:
    size = value["size"]
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a group's size must be an integer >= 1, got {size!r}")
    bandwidth = _figure(value["bytes_per_s"])
    if bandwidth.low <= 0:
        raise ValueError(f"a link's bandwidth must be above 0, got {bandwidth.low:g}")
    return Link(size, bool(value["is_across"]), _figure(value["latency_s"]), bandwidth)
