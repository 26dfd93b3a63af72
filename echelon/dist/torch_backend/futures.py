"""Run threads that complete torch futures in the order of the operations.

The thread that waits for an operation completes the operation's future and runs the future's
callbacks. If a callback waits for a later future, as in DDP's PowerSGD hook, another thread
completes that future.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]

_CLOSE_S = 1.0


class FutureThreads:
    """The threads that complete one group's futures: one or more per kind of operation.

    A callback runs on the thread that completes its future. If the callback starts operations of
    the same kind, their futures are completed by an additional thread.
    """

    def __init__(self) -> None:
        self._threads: dict[str, _Thread] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def submit(self, name: str, job: Job) -> None:
        """Run a job on the thread for `name`, after the jobs that were submitted to it earlier.

        If the caller is this thread itself, the job runs on an additional thread.
        """
        title = f"echelon-torch-{name}"
        running = threading.current_thread().name
        if running.startswith(title):
            title = f"{running}+"
        with self._lock:
            thread = self._threads.get(title)
            if thread is None:
                thread = self._threads[title] = _Thread(title)
        thread.submit(job)

    def close(self) -> None:
        """Stop the threads once their operations have ended. Blocks for at most 1 s."""
        if os.getpid() != self._pid:
            return  # the threads are the parent's
        with self._lock:
            threads = list(self._threads.values())
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.finish()
        for thread in threads:
            thread.join(deadline_s)


class _Thread:
    def __init__(self, name: str) -> None:
        self._jobs: deque[Job | None] = deque()
        self._filled = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job | None) -> None:
        self._jobs.append(job)
        self._filled.release()

    def finish(self) -> None:
        self.submit(None)

    def join(self, deadline_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self) -> None:
        while True:
            self._filled.acquire()
            job = self._jobs.popleft()
            if job is None:
                return
            try:
                job()
            except Exception:  # noqa: BLE001 -- a user's callback must not end the others' futures
                sys.excepthook(*sys.exc_info())
            del job  # an idle thread keeps no arrays alive
