"""Convert timeouts into deadlines."""

from __future__ import annotations

import math
import time
from datetime import timedelta

Timeout = float | timedelta


def seconds(timeout: Timeout) -> float:
    """Convert a timeout to seconds.

    Raises:
        ValueError: the timeout is not positive or not finite; every wait must have a deadline.
    """
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < value < math.inf:
        raise ValueError(f"timeout must be positive and finite, got {timeout!r}")
    return value


def time_left_s(deadline_s: float) -> float:
    """Return the number of seconds until a `time.monotonic()` value, at least 0.001.

    Many calls treat a timeout of 0 or less as an error, or as no limit.
    """
    return max(0.001, deadline_s - time.monotonic())


class Deadline:
    """A point in time by which a call must be complete.

    Attributes:
        timeout_s: the timeout from which the deadline was created.
        at: the `time.monotonic()` value at which the deadline expires.
    """

    __slots__ = ("at", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The number of seconds until the deadline expires, at least 0."""
        return max(0.0, self.at - time.monotonic())
