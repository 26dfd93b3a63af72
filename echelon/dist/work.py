"""Work: the handle of an operation that may still be running.

Operations of one group run in the order of their calls. A blocking one runs on the caller's thread
if nothing is queued before it; an asynchronous one runs on the group's own thread, started when the
first is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from echelon.errors import CollectiveTimeoutError


class Work:
    """An operation in flight. `done` is truthful: True only once the result is in place."""

    __slots__ = ("_error", "_finished", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._error: BaseException | None = None
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation has ended.

        Raises:
            CollectiveTimeoutError: it has not within `timeout_s`; it goes on and can be waited for
                again. (Without a limit the operation's own timeout bounds the wait.)
            CollectiveError: what the operation itself ended with.
        """
        if not self._finished.wait(timeout_s):
            raise CollectiveTimeoutError(f"{self._what}: not done after {timeout_s} s of wait()")
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as ended. For the group that runs it."""
        self._error = error
        self._finished.set()


class Lane:
    """The thread on which a group's asynchronous operations run, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Work, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Work | None = None
        self._lock = threading.Lock()

    def submit(self, work: Work, run: Callable[[], None]) -> None:
        """Queue an operation."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"echelon-{self._name}", daemon=True
                )
                self._thread.start()
            self._last = work
            self._queue.put((work, run))

    def run_inline(self, run: Callable[[], None]) -> None:
        """Run an operation on this thread once everything queued before it has ended."""
        last = self._last
        if last is not None and not last.done:
            work = Work(self._name)
            self.submit(work, run)
            work.wait()
            return
        with self._lock:
            run()

    def close(self, timeout_s: float) -> None:
        """End the thread after what is queued, waiting at most `timeout_s`."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._queue.put(None)
        thread.join(timeout_s)
        self._thread = None

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, run = item
            try:
                run()
            except BaseException as err:  # noqa: BLE001 -- it belongs to who waits for the work
                work.finish(err)
            else:
                work.finish()
