"""Provide a lane: a queue that ensures that a library such as oneCCL executes one call at a time.

All groups in a process share the lane. A collective can be called on any thread, and runs after the
calls that are already in the queue. If the lane is idle, a blocking call runs on the caller's
thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from echelon.dist.progress.outcome import Outcome

_CLOSE_S = 5.0


class LanePending(Outcome):
    """An operation that was submitted to a lane."""

    __slots__ = ()

    def join(self) -> None:
        """Block until the operation has ended; raise its error if it failed."""
        while not self.wait(0.1):
            pass  # in slices: a signal's handler runs between them
        if self.error is not None:
            raise self.error

    def run(self, job: Callable[[], None]) -> None:
        """Run the job on this thread and record its outcome."""
        try:
            job()
        except BaseException as err:  # noqa: BLE001 -- it belongs to the one that waits for it
            self.finish(err)
        self.finish()


class Lane:
    """A queue of jobs that run one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[LanePending, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if no job is running or queued."""
        with self._changed:
            return not self._busy and not self._jobs

    def submit(self, job: Callable[[], None]) -> LanePending:
        """Queue a job for the lane's thread."""
        pending = LanePending()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.append((pending, job))
            self._changed.notify_all()
        return pending

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on the calling thread if the lane is idle, otherwise on the lane's thread.

        Blocks until the job has ended.
        """
        with self._changed:
            inline = not self._busy and not self._jobs
            self._busy = self._busy or inline
        if not inline:
            self.submit(job).join()
            return
        try:
            job()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self, *, wait: bool = True) -> None:
        """Let the thread exit once all queued jobs have run.

        With `wait`, block until the thread exits, but for at most 5 s.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._busy or not self._jobs:
                    if self._closed and not self._jobs:
                        return
                    self._changed.wait()
                pending, job = self._jobs.popleft()
                self._busy = True
            pending.run(job)
            del pending, job  # an idle lane keeps no caller's arrays
            with self._changed:
                self._busy = False
                self._changed.notify_all()
