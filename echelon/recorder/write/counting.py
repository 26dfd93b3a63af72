"""Generate unique, consecutive numbers for several threads."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable


def counter(start: int = 0, *, has_lock: bool | None = None) -> Callable[[], int]:
    """Return a thread-safe function that counts up from `start`.

    Args:
        has_lock: whether the interpreter has a global lock, which makes `itertools.count` atomic.
            None means that the interpreter is checked.
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
