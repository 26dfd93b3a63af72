"""A group's operations in flight, until each end is noted in the black box."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import echelon.recorder.current as black_box
from echelon.dist.backends.interface import Backend, Members
from echelon.dist.errors import build
from echelon.dist.operation.operation import Operation
from echelon.dist.work import Work
from echelon.errors import CollectiveError
from echelon.recorder.recorder import NOT_RECORDED

_SWEEP_S = 0.5


class Flight:
    """A group's asynchronous operations that have not been seen to end.

    Keeps their arrays alive, and notes each end in the black box with the time at which the backend
    finished it: when the user waits, when the next operation is called, or at the latest from a
    small thread, for what nobody waits for.
    """

    def __init__(
        self, members: Members, backend: Backend, on_error: Callable[[CollectiveError], None]
    ) -> None:
        """`on_error` hears of each operation that failed, in the order of the calls."""
        self._members = members
        self._backend = backend
        self._on_error = on_error
        self._works: list[Work] = []
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def launch(self, operation: Operation, record: int) -> Work:
        """Hand one operation to the backend.

        Raises:
            CollectiveError: it failed at once; the caller notes that.
        """
        recorder = None if record == NOT_RECORDED else black_box.current()
        if recorder is not None:
            recorder.started(record)
        try:
            pending = self._backend.submit(operation)
        except CollectiveError:
            raise
        except BaseException as err:
            if recorder is not None:
                recorder.failed(record, err)
            raise
        work = Work(build.place(self._members, operation), pending, record, self.settle)
        with self._lock:
            self._works.append(work)
            if self._thread is None and record != NOT_RECORDED:
                name = f"echelon-sweep-{self._members.name}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        return work

    def sweep(self) -> None:
        """Settle what has ended."""
        if self._works:
            with self._lock:
                for work in [one for one in self._works if one.done]:
                    self._settle(work)

    def settle(self, work: Work) -> None:
        """Note the end of an operation, after those before it: the first error is the cause.

        One on a device may have been waited for and still run: it is noted later.
        """
        with self._lock:
            for earlier in [one for one in self._works if one.done]:
                self._settle(earlier)
            if work.done:
                self._settle(work)

    def close(self) -> None:
        """End the thread."""
        self.sweep()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _SWEEP_S)

    def _settle(self, work: Work) -> None:
        if work.settled:
            return
        work.settled = True
        work.error = work.pending.error
        with contextlib.suppress(ValueError):
            self._works.remove(work)
        if isinstance(work.error, CollectiveError):
            self._on_error(work.error)
        if work.record == NOT_RECORDED:
            return
        recorder = black_box.current()
        if recorder is None:
            return
        if work.error is not None:
            recorder.failed(work.record, work.error)
        else:
            recorder.completed(work.record, work.pending.ended_mono_ns or time.monotonic_ns())

    def _serve(self) -> None:
        while not self._stop.wait(_SWEEP_S):
            self.sweep()
