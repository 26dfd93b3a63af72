"""Track how much time each thread has spent in spans and in collectives.

Unlike the contents of a ring, the totals are available even if recording is off, and are never
overwritten. Each thread has its own totals, so that time that a checkpoint thread spends waiting
does not count as training time.
"""

from __future__ import annotations

import threading

MAX_NAMES = 256  # of spans; a program that numbers its spans must not grow a table


class Spent(threading.local):
    """The calling thread's time totals.

    Attributes:
        spans_ns: the total duration of ended spans in nanoseconds, keyed by name. A span inside
            another span of the same name does not count.
        collectives_s: the time for which the thread was blocked in collectives and point-to-point
            transfers, in seconds. Communication that overlaps with computation does not count.
    """

    def __init__(self) -> None:
        self.spans_ns: dict[str, int] = {}
        self.collectives_s = 0.0


spent = Spent()
