"""Give threads consecutive numbers, each only once, without a lock where possible."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable


def counter(start: int = 0, *, has_lock: bool | None = None) -> Callable[[], int]:
    """Return a thread-safe function that counts up from `start`, returning one number per call.

    Args:
        has_lock: whether the interpreter runs one thread at a time, which makes `itertools.count`
            atomic; None means that this is detected. Without a lock, free-threaded Python 3.13 may
            give two threads the same number.
    """
    numbers = itertools.count(start)
    if has_lock is None:
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if has_lock:
        return numbers.__next__
    # A signal handler that records may interrupt and draw a number itself, hence not a plain Lock.
    lock = threading.RLock()

    def draw() -> int:
        with lock:
            return next(numbers)

    return draw
