"""Learn time limits for one call site in a group, or for one phase, from past durations.

A history provides two limits:

* `limit_s`: how long an operation can be pending before it is examined. This limit is shorter than
  the stall rule's fixed limit. To avoid false alarms, it requires many samples and exceeds both the
  99.9th percentile and the longest sample by a margin. The margin is larger if the durations vary
  widely.
* `patience_s`: how long the stall rule waits for an operation or phase if earlier operations or
  phases exceeded the fixed limit but completed. This limit requires only a few samples, and is
  bounded.

The first samples do not count towards `limit_s`, because they include warm-up: compilation, cold
caches and new connections.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echelon.launcher.limits.sketch import Sketch

NUM_WARM_UP = 16  # samples that do not count towards `limit_s`
MIN_SAMPLES = 500  # after the warm-up
QUANTILE = 0.999
QUANTILE_MARGIN = 3.0
TAIL_TENTHS = 3  # so that a duration that occurs once in a million is not too long
LONGEST_MARGIN = 3.0
FLOOR_S = 10.0
MAX_SHARE = 0.5  # of the fixed limit; beyond this, an early look gains little time
PATIENCE_FACTOR = 2.0  # times the longest completed duration
MAX_PATIENCE = 5  # times the fixed limit, as for the time before init


class History:
    """The past durations of operations at one call site, or of phases with one name.

    Args:
        fixed_s: the stall rule's limit, in seconds.
        num_long: how many samples must be longer than `fixed_s` for long durations to count as
            normal.
    """

    __slots__ = ("_first_ns", "_fixed_s", "_last_ns", "_num_left", "_num_long", "_slowest_ns",
                 "longest_s", "sketch")  # fmt: skip

    def __init__(self, fixed_s: float, num_long: int) -> None:
        self._fixed_s = fixed_s
        self._num_left = NUM_WARM_UP
        self._num_long = num_long
        self._slowest_ns = 0  # including the warm-up
        self._first_ns = self._last_ns = 0
        self.longest_s = 0.0  # after the warm-up
        self.sketch = Sketch()

    def add(self, durations_ns: npt.NDArray[np.int64], now_ns: int) -> None:
        """Add an array of durations of completed operations, [num_durations], oldest first."""
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
        """The time, in seconds, after which a pending operation is examined; None if unknown."""
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
        """The stall rule's limit for an operation or phase, in seconds.

        0 means that the fixed limit applies.
        """
        if self._num_long > 0:
            return 0.0
        return min(PATIENCE_FACTOR * self._slowest_ns / 1e9, MAX_PATIENCE * self._fixed_s)
