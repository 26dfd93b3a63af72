"""Choose each sample's source by exact weights, without randomness or stored history.

The algorithm is smooth weighted round robin. Each draw adds every source's weight to that source's
credit, selects the source with the largest credit, and subtracts the sum of all weights from the
credit of that source. After any number of draws, the number of samples drawn from a source differs
from the source's exact share by at most n - 1, where n is the number of sources. Credits are
integers, so every rank computes the same sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.tokens.shards import TokenShards

_UNIT = 1 << 32  # weights are integers in steps of 2**-32 of the sum


@dataclass(frozen=True)
class Source:
    """A named, weighted set of token shards from which samples are drawn.

    Attributes:
        name: the source's name in the loader's state.
        shards: the tokens of the source.
        weight: the relative frequency with which samples are drawn from the source; with 0, the
            source is not used.

    Raises:
        ValueError: the weight is negative or not finite.

    Example:
        >>> web = Source("web", TokenShards("web"), weight=0.8)
        >>> code = Source("code", TokenShards("code"), weight=0.2)
    """

    name: str
    shards: TokenShards
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"the weight of source {self.name!r} must be finite and at least 0, got "
                f"{self.weight}"
            )


@dataclass(frozen=True)
class Drawn:
    """The source of each drawn sample, and the sample's index within that source.

    Attributes:
        source: the index of each sample's source: int64 [num].
        number: the index of each sample within its source, counted over all epochs: int64 [num].
    """

    source: NDArray[np.int64]
    number: NDArray[np.int64]


class Mixture:
    """A sequence in which each source occurs in proportion to its weight.

    Args:
        weights: one weight per source; at least one must be above 0.
    """

    def __init__(self, weights: list[float]) -> None:
        total = sum(weights)
        if not total > 0:
            raise ValueError("at least one source must have a weight above 0")
        self._weights = [round(weight / total * _UNIT) for weight in weights]
        self._total = sum(self._weights)
        self.credits = [0] * len(weights)
        self.taken = [0] * len(weights)  # number of samples of each source, over all epochs

    def draw(self, num: int) -> Drawn:
        """Draw the sources of the next `num` samples."""
        source, number = np.empty(num, np.int64), np.empty(num, np.int64)
        for place in range(num):
            for i, weight in enumerate(self._weights):
                self.credits[i] += weight
            chosen = self._richest()
            self.credits[chosen] -= self._total
            source[place], number[place] = chosen, self.taken[chosen]
            self.taken[chosen] += 1
        return Drawn(source, number)

    def _richest(self) -> int:
        """Return the first source with the largest credit among those with a weight above 0."""
        drawn = [i for i, weight in enumerate(self._weights) if weight]
        return max(drawn, key=lambda i: (self.credits[i], -i))
