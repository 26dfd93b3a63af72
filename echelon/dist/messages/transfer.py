"""Transfer: one posted send or receive, from the call to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from echelon.dist.messages.frames import dtype_key
from echelon.dist.operation.operation import ANY_SOURCE, Operation


class Watch(Protocol):
    """What bounds a transfer.

    Attributes:
        deadline_s: when it times out, on the monotonic clock.
    """

    deadline_s: float

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise what ends the transfer: its deadline, or a death among the `needed` ranks."""


class Transfer:
    """A send or a receive; the `Pending` of its operation.

    Attributes:
        operation: what the caller asked for.
        dtype: the key of its dtype's name.
        data: [num_bytes] of the caller's array, which it keeps alive.
        source: group rank that sent what a receive got; -1 until that is known.
        order: number among the posted receives of the group; the lower was posted first.
        moved: bytes that have left or arrived so far.
        watch: what bounds it; None if the thread that called it watches over it.
    """

    __slots__ = (
        "_ended_mono_ns", "_error", "_finished", "data", "dtype", "moved", "operation", "order",
        "source", "watch",
    )  # fmt: skip

    def __init__(self, operation: Operation, watch: Watch | None = None) -> None:
        flat = operation.source if operation.kind == "send" else operation.target
        assert flat is not None, operation
        self.operation = operation
        self.dtype = dtype_key(operation.dtype)
        raw: Any = flat.view(np.uint8)
        self.data = memoryview(raw)
        self.source = -1
        self.order = 0
        self.moved = 0
        self.watch = watch
        self._error: BaseException | None = None
        self._ended_mono_ns = 0
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None if it succeeded or has not ended."""
        return self._error

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 while it has not."""
        return self._ended_mono_ns

    def needed(self) -> list[int]:
        """Return the group ranks without which it cannot end."""
        return [] if self.done else [self.operation.peer]

    def check(self) -> None:
        """Raise what its watch finds; see `Watch.check`."""
        if self.watch is not None:
            self.watch.check(None if self.operation.peer == ANY_SOURCE else self.needed)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time is up; return whether it has ended."""
        return self._finished.wait(timeout_s)

    def finish(self, error: BaseException | None = None) -> None:
        """End it; only the first call counts. Called by the thread that drives the messages."""
        if not self._finished.is_set():
            self._error = error
            self._ended_mono_ns = time.monotonic_ns()
            self._finished.set()
