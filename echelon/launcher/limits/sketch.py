"""Estimate quantiles of durations in bounded memory, with an error of less than 11%.

The sketch counts durations in buckets whose edges grow by a constant factor, as DDSketch does
(Masson, Rim, Lee: "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019). The 256 buckets cover durations from 1 us to more than a day, so buckets
never need to be merged.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.05
NUM_BUCKETS = 256
_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_UNIT_NS = 1000.0  # the upper edge of the first bucket


class Sketch:
    """The number of durations in each bucket."""

    __slots__ = ("_counts", "num")

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BUCKETS, np.int64)
        self.num = 0

    def add(self, durations_ns: npt.NDArray[np.int64]) -> None:
        """Add durations, of shape [num_durations], to the sketch."""
        units = np.maximum(durations_ns / _UNIT_NS, 1.0)
        buckets = np.ceil(np.log(units) / _LOG_GAMMA - 1e-9).astype(np.int64)
        clipped = np.minimum(buckets, NUM_BUCKETS - 1)
        self._counts += np.bincount(clipped, minlength=NUM_BUCKETS)
        self.num += len(durations_ns)

    def quantile_s(self, share: float) -> float:
        """Return the upper edge, in seconds, of the bucket that contains a quantile.

        The upper edge exceeds the nearest-rank quantile by less than 11 %. The result is 0 if the
        sketch is empty.
        """
        if not self.num:
            return 0.0
        rank = max(1, math.ceil(share * self.num))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return math.exp(bucket * _LOG_GAMMA) * _UNIT_NS / 1e9
