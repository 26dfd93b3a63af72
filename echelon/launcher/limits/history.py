"""How long one call site's operations in one group take, or one phase, and when that is too long.

Two questions, with opposite care:

* `limit_s`: from when on a pending operation is worth a look although the fixed limit of the stall
  rule has not passed. A false alarm is worse than a late one, so it takes many samples over a time
  no shorter than the fixed limit, keeps a margin over the 99.9th percentile and over the longest
  that ever ended, and is None where it would save little. From the 99th percentile to the 99.9th
  an uneven job's durations grow by some factor: the limit leaves room for three such tenths more.
* `patience_s`: how long something may take that has taken longer than the fixed limit before and
  succeeded. It takes few samples, and is bounded.

The first samples do not count: compilers, caches and connections are warm only after them. They
raise the patience alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echelon.launcher.limits.sketch import Sketch

NUM_WARM_UP = 16  # samples that do not count towards `limit_s`
MIN_SAMPLES = 500  # after them
QUANTILE = 0.999
QUANTILE_MARGIN = 3.0
TAIL_TENTHS = 3  # so that one in a million of uneven durations is not too long
LONGEST_MARGIN = 3.0
FLOOR_S = 10.0
MAX_SHARE = 0.5  # of the fixed limit: beyond it, an early look is hardly earlier
PATIENCE_FACTOR = 2.0  # over the longest that ended
MAX_PATIENCE = 5  # times the fixed limit, as for the time before init


class History:
    """What ended of one operation or phase.

    Args:
        fixed_s: the stall rule's limit.
        num_long: how many samples beyond `fixed_s` make it a habit.
    """

    __slots__ = ("_first_ns", "_fixed_s", "_last_ns", "_num_left", "_num_long", "_slowest_ns",
                 "longest_s", "sketch")  # fmt: skip

    def __init__(self, fixed_s: float, num_long: int) -> None:
        self._fixed_s = fixed_s
        self._num_left = NUM_WARM_UP
        self._num_long = num_long
        self._slowest_ns = 0  # warm-up included
        self._first_ns = self._last_ns = 0
        self.longest_s = 0.0  # after the warm-up
        self.sketch = Sketch()

    def add(self, durations_ns: npt.NDArray[np.int64], now_ns: int) -> None:
        """Take in operations that ended, oldest first. [num_durations]"""
        self._slowest_ns = max(self._slowest_ns, int(durations_ns.max(initial=0)))
        self._num_long -= int((durations_ns > self._fixed_s * 1e9).sum())
        warm = durations_ns[self._num_left :]
        self._num_left = max(0, self._num_left - len(durations_ns))
        if not len(warm):
            return
        self._first_ns = self._first_ns or now_ns
        self._last_ns = now_ns
        self.longest_s = max(self.longest_s, int(warm.max()) / 1e9)
        self.sketch.add(warm)

    @property
    def limit_s(self) -> float | None:
        """From when on an operation is slower than its history; None: it has too little of it."""
        lasted_s = (self._last_ns - self._first_ns) / 1e9
        if self.sketch.num < MIN_SAMPLES or lasted_s < self._fixed_s:
            return None
        usual_s = self.sketch.quantile_s(QUANTILE)
        growth = usual_s / self.sketch.quantile_s(1 - 10 * (1 - QUANTILE))
        limit_s = max(
            FLOOR_S,
            usual_s * max(QUANTILE_MARGIN, growth**TAIL_TENTHS),
            LONGEST_MARGIN * self.longest_s,
        )
        return limit_s if limit_s <= MAX_SHARE * self._fixed_s else None

    @property
    def patience_s(self) -> float:
        """How long the stall rule waits for it; 0: no longer than for anything else."""
        if self._num_long > 0:
            return 0.0
        return min(PATIENCE_FACTOR * self._slowest_ns / 1e9, MAX_PATIENCE * self._fixed_s)
