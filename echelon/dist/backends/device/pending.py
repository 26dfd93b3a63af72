"""Track a device operation from the time it is issued until the device has completed it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from echelon.dist.backends.device.clock import DeviceClock, Tie
from echelon.dist.backends.device.runtime import DeviceRuntime
from echelon.dist.operation.operation import Operation

_SLICE_S = 0.1
_TIMED = {"enable_timing": True}


class LibraryFailed(RuntimeError):  # noqa: N818 -- `CollectiveError` is what users see
    """Raised when the library reports an error in a launched operation."""


class DevicePending:
    """A handle to an operation on a device.

    The object keeps the arrays alive until the device has completed the operation.

    Attributes:
        operation: the user's operation; None after the device has completed it.
        index: the device index.
        is_detached: whether the caller's streams continue without waiting for the operation.
        tensors: the flat source and target tensors; None where the operation has no such array.
        is_launched: an event that is set when the operation has been queued on the stream or has
            failed.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        operation: Operation,
        tensors: tuple[Any, Any],
        index: int,
        callers: Sequence[Any],
        failure: Callable[[], str],
    ) -> None:
        """Record the current position in each of the caller's streams.

        The operation's device must be the current device.

        Args:
            index: the device index.
            callers: the streams on which the caller uses the arrays, beginning with the current
                stream.
            failure: a function that returns the library's error, or "" if there is none.
        """
        self._runtime = runtime
        self.operation: Operation | None = operation
        self.is_detached = operation.is_detached
        self.tensors = tensors
        self.index = index
        self.is_launched = threading.Event()
        self._callers = callers
        self._failure = failure
        self._ready = [runtime.accelerator.Event() for _ in callers]
        for event, stream in zip(self._ready, callers, strict=True):
            event.record(stream)
        self._start: Any = None
        self._end: Any = None
        self._tie: Tie | None = None
        self._error: BaseException | None = None
        self._started_mono_ns = 0
        self._ended_mono_ns = 0

    # ---- launching, by the engine ----

    def begin(self, stream: Any, clock: DeviceClock) -> None:
        """Make a stream wait for the caller's streams, and record the start event on the stream.

        The operation's device must be the current device.
        """
        for event in self._ready:
            stream.wait_event(event)
        self._tie = clock.tie()
        self._start = self._runtime.accelerator.Event(**_TIMED)
        self._start.record(stream)

    def launched(self, stream: Any) -> None:
        """Record that the operation has been queued on the stream."""
        end = self._runtime.accelerator.Event(**_TIMED)
        end.record(stream)
        self._end = end
        self.is_launched.set()

    def fail(self, error: BaseException) -> None:
        """Record that the operation failed; only the first error is retained."""
        if self._error is None and not self._ended_mono_ns:
            self._error = error
        self.is_launched.set()

    @property
    def is_over(self) -> bool:
        """True once the operation has ended, including its work on the device.

        Reading this property can query the device.
        """
        return self.done and (self._ended_mono_ns != 0 or self.is_at_rest)

    @property
    def is_at_rest(self) -> bool:
        """True once the device has finished using the arrays."""
        if self._end is None:
            return self._start is None
        try:
            return self._runtime.has_happened(self._end)
        except Exception:  # noqa: BLE001 -- nothing is known of a device that failed
            return False

    # ---- what the group asks ----

    @property
    def done(self) -> bool:
        """True once the operation has failed or the device has completed it. Never blocks."""
        if self._error is None and not self._ended_mono_ns and self._end is not None:
            self._look()
        return self._error is not None or self._ended_mono_ns != 0

    @property
    def error(self) -> BaseException | None:
        """The error that made the operation fail, or None."""
        return self._error

    @property
    def started_mono_ns(self) -> int:
        """The monotonic time at which the device started the operation, in nanoseconds.

        The value is 0 until the operation ends.
        """
        return self._started_mono_ns

    @property
    def ended_mono_ns(self) -> int:
        """The monotonic time when the operation ended, in nanoseconds; 0 while it is running."""
        return self._ended_mono_ns

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the operation is queued, and make the caller's streams wait for it.

        The first operation on a group can block until the other ranks have also issued it. For a
        detached operation, the method returns immediately.

        Returns:
            False if `timeout_s` seconds passed before the operation was queued.
        """
        if self.is_detached:  # made from a copy, and no result comes of it
            return True
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_launched.wait(_SLICE_S if limit_s is None else _left(limit_s)):
            if limit_s is not None and time.monotonic() >= limit_s:
                return False
        if self._end is not None and not self.done:
            self._order_behind()
        return True

    def _order_behind(self) -> None:
        accelerator = self._runtime.accelerator
        with accelerator.device(self.index):
            for stream in (accelerator.current_stream(), *self._callers[1:]):
                stream.wait_event(self._end)

    def _look(self) -> None:
        try:
            if not self._runtime.has_happened(self._end):
                if said := self._failure():
                    raise LibraryFailed(said)
                return
        except Exception as err:  # noqa: BLE001 -- a failed device raises at every question
            self._error = err
            return
        assert self._tie is not None
        self._started_mono_ns = DeviceClock.mono_ns(self._tie, self._start)
        self._ended_mono_ns = DeviceClock.mono_ns(self._tie, self._end) or time.monotonic_ns()
        self.operation, self.tensors, self._ready = None, (None, None), []


class DonePending:
    """A handle to an operation that was captured in a graph or has nothing to do."""

    error = None
    done = True

    def __init__(self) -> None:
        self.ended_mono_ns = time.monotonic_ns()

    def wait(self, timeout_s: float | None) -> bool:  # noqa: ARG002
        """Return True immediately."""
        return True


def _left(limit_s: float) -> float:
    return min(_SLICE_S, max(0.0, limit_s - time.monotonic()))
