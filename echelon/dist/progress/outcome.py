"""Record the outcome of an operation for the threads that wait for it."""

from __future__ import annotations

import threading
import time


class Outcome:
    """The outcome of an operation: still running, failed with an error, or succeeded.

    Thread-safe.
    """

    __slots__ = ("_ended_mono_ns", "_error", "_finished")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._ended_mono_ns = 0
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """True if the operation has succeeded or failed."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error with which the operation failed; None if it succeeded or has not ended."""
        return self._error

    @property
    def ended_mono_ns(self) -> int:
        """The monotonic time at which the operation ended, or 0 while it is running."""
        return self._ended_mono_ns

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the operation ends or the timeout expires; return whether it ended."""
        return self._finished.wait(timeout_s)

    def finish(self, error: BaseException | None = None) -> None:
        """Record the end of the operation; only the first call has an effect."""
        if not self._finished.is_set():
            self._error = error
            self._ended_mono_ns = time.monotonic_ns()
            self._finished.set()
