"""Track the time that a thread has spent in its spans, by name, and in collectives.

A ring holds only the newest operations and spans, and exists only if the process records. A program
that logs its own figures needs totals that neither wrap around nor depend on recording, so the
totals are kept here. Each thread has its own totals, because the waits of a thread that saves a
checkpoint must not count towards the training thread's figures.
"""

from __future__ import annotations

import threading

MAX_NAMES = 256  # of spans; a program that numbers its spans must not grow a table


class Spent(threading.local):
    """The totals of the calling thread.

    Attributes:
        spans_ns: the total duration of ended spans in nanoseconds, keyed by name. Of nested spans
            with the same name, only the outermost counts.
        collectives_s: the seconds for which the thread was blocked in a collective or a message of
            echelon's groups, or was waiting for a torch `Work` while hooks recorded the program. An
            asynchronous operation counts while the thread waits for it, so time hidden by
            computation is excluded. On a device, only the time that blocks the host counts.
    """

    def __init__(self) -> None:
        self.spans_ns: dict[str, int] = {}
        self.collectives_s = 0.0


spent = Spent()
