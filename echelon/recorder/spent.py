"""What a thread has spent its time on so far: its spans by name, and its collectives.

A ring holds the newest operations and spans, and only where a process records. A program that logs
its own figures needs totals that neither wrap nor depend on that, so they are kept here, one set
for each thread: a training thread's shares must not contain what a thread that saves a checkpoint
waits for.
"""

from __future__ import annotations

import threading

MAX_NAMES = 256  # of spans; a program that numbers its spans must not grow a table


class Spent(threading.local):
    """Totals of the calling thread.

    Attributes:
        spans_ns: by name, the nanoseconds that ended spans took; of nested spans with one name the
            outermost counts.
        collectives_s: seconds in which the thread stood still in a collective or a message of
            echelon's groups, or waited for a work of torch's where hooks record the program. An
            asynchronous one counts while the thread waits for it, so what computation hides is not
            in here; on a device only what blocks the host is.
    """

    def __init__(self) -> None:
        self.spans_ns: dict[str, int] = {}
        self.collectives_s = 0.0


spent = Spent()
