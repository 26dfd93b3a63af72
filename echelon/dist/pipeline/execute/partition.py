"""`split`: a model of consecutive layers, divided into stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn


def split(
    model: nn.Sequential | Sequence[nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
) -> list[nn.Sequential]:
    """Divide consecutive layers so that the dearest stage is as cheap as can be.

    Args:
        model: layers that run one after the other, each on what the one before returned.
        num_stages: into how many; at most as many as there are layers.
        costs: of each layer, in any unit, measured best; None: its number of parameters, and a
            little for being there.

    Returns:
        The stages, in order. Their layers are the model's own modules, not copies.

    Raises:
        ValueError: numbers do not fit.
    """
    layers = list(model)
    if not all(isinstance(layer, nn.Module) for layer in layers):
        raise ValueError("split takes an nn.Sequential or a list of modules")
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be split into {num_stages} stages")
    if costs is None:
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        costs = [size + 0.01 * (sum(sizes) or 1) / len(layers) for size in sizes]
    if len(costs) != len(layers) or min(costs) < 0:
        raise ValueError(f"costs: expected {len(layers)} numbers from 0 on, got {list(costs)}")
    ends = [*_cuts(list(costs), num_stages), len(layers)]
    starts = [0, *ends[:-1]]
    return [nn.Sequential(*layers[a:b]) for a, b in zip(starts, ends, strict=True)]


def _cuts(costs: list[float], num_parts: int) -> list[int]:
    """Return where to cut: dynamic programming over (parts, layers), least dearest part first."""
    total = [0.0, *accumulate(costs)]
    num = len(costs)
    # best[n]: the dearest of the parts that the first n layers make; cut[k][n]: its last start.
    best = total[:]
    cut: list[list[int]] = []
    for parts in range(2, num_parts + 1):
        row = [float("inf")] * (num + 1)
        chosen = [0] * (num + 1)
        for n in range(parts, num + 1):
            row[n], chosen[n] = min(
                (max(best[start], total[n] - total[start]), start) for start in range(parts - 1, n)
            )
        best = row
        cut.append(chosen)
    cuts: list[int] = []
    end = num
    for chosen in reversed(cut):
        end = chosen[end]
        cuts.append(end)
    return cuts[::-1]
