"""DevicePending: an operation on a device, from its call until the device has done it."""

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
    """What the library reports of an operation that was launched."""


class DevicePending:
    """An operation that was handed to the device, or is about to be.

    It keeps the arrays until the device has done it, so the allocator need not know of the engine's
    streams.

    Attributes:
        operation: what was called; None once the device has done it.
        index: the device.
        is_detached: whether the caller does not wait for it.
        tensors: source and target, flat; None where there is none.
        is_launched: set once it is on the stream, or has failed.
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
        """Note where the callers' streams are now; made with the device current.

        Args:
            index: the device.
            callers: the streams on which the caller works on the arrays, the current one first.
            failure: returns what the library reports; "" if nothing.
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
        """Order a stream behind the callers', and note the start; with the device current."""
        for event in self._ready:
            stream.wait_event(event)
        self._tie = clock.tie()
        self._start = self._runtime.accelerator.Event(**_TIMED)
        self._start.record(stream)

    def launched(self, stream: Any) -> None:
        """Note that the operation is on the stream."""
        end = self._runtime.accelerator.Event(**_TIMED)
        end.record(stream)
        self._end = end
        self.is_launched.set()

    def fail(self, error: BaseException) -> None:
        """Note how it failed; the first error stays."""
        if self._error is None and not self._ended_mono_ns:
            self._error = error
        self.is_launched.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and the device with it; may ask the device."""
        return self.done and (self._ended_mono_ns != 0 or self.is_at_rest)

    @property
    def is_at_rest(self) -> bool:
        """Whether the device works on the arrays no more."""
        if self._end is None:
            return self._start is None
        try:
            return self._runtime.has_happened(self._end)
        except Exception:  # noqa: BLE001 -- nothing is known of a device that failed
            return False

    # ---- what the group asks ----

    @property
    def done(self) -> bool:
        """Whether the device has done it, or it has failed. Never blocks."""
        if self._error is None and not self._ended_mono_ns and self._end is not None:
            self._look()
        return self._error is not None or self._ended_mono_ns != 0

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    @property
    def started_mono_ns(self) -> int:
        """When the device began it, waiting for peers included; 0 while it has not ended."""
        return self._started_mono_ns

    @property
    def ended_mono_ns(self) -> int:
        """When the device ended it; 0 while it has not."""
        return self._ended_mono_ns

    def wait(self, timeout_s: float | None) -> bool:
        """Order the caller's streams behind it; block only while it is not on its stream yet.

        It is not as long as the library connects to ranks that have not called it. Nothing waits
        for a detached one.
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
    """An operation with no end of its own: it became part of a graph, or nothing was to be done."""

    error = None
    done = True

    def __init__(self) -> None:
        self.ended_mono_ns = time.monotonic_ns()

    def wait(self, timeout_s: float | None) -> bool:  # noqa: ARG002
        """Return at once: a graph is ordered as the caller's stream is."""
        return True


def _left(limit_s: float) -> float:
    return min(_SLICE_S, max(0.0, limit_s - time.monotonic()))
