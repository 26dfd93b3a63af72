"""Outcome: how an operation ended, for its waiters; the base of `Pending` on the host."""

from __future__ import annotations

import threading
import time


class Outcome:
    """The outcome of an operation: not ended, then its error or success. Thread-safe."""

    __slots__ = ("_ended_mono_ns", "_error", "_finished")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._ended_mono_ns = 0
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error with which it failed; None if it succeeded or has not ended."""
        return self._error

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 until then."""
        return self._ended_mono_ns

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time has expired; return whether it has ended."""
        return self._finished.wait(timeout_s)

    def finish(self, error: BaseException | None = None) -> None:
        """End it; only the first call counts."""
        if not self._finished.is_set():
            self._error = error
            self._ended_mono_ns = time.monotonic_ns()
            self._finished.set()
