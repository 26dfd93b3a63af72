"""Run the watcher: one thread per process that monitors the operations of all groups.

The watcher notices the ends of operations that no caller waits for, so that the black box records
when they end. For engines without a thread of their own, the watcher checks for missed deadlines
and dead ranks. It also runs jobs that must not delay a failing call, such as publishing a verdict.
The thread exits when no operation is left to watch, and starts again when needed. A forked child
has its own watcher.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

_TICK_S = 0.1
_JOIN_S = 0.5
_LINGER_S = 2.0  # a thread costs more to start than to keep for a moment


class Watched(Protocol):
    """An object that the watcher checks periodically."""

    def tick(self) -> bool:
        """Check the object; return False if it no longer needs to be watched."""


class Watcher:
    """The watcher's thread. `add`, `remove` and `post` never block."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._jobs: deque[Callable[[], None]] = deque()
        # Threads that run jobs: one that is to end may still look while the next one has begun.
        self._running: set[int] = set()
        self._is_behind = False  # jobs have outlasted a flush and still have not all run
        self._wake = threading.Event()
        # Of what is watched and of the thread; held for moments, also by a signal handler.
        self._guard = threading.RLock()
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch an object until its `tick` returns False."""
        with self._guard:
            if watched in self._watched:
                return
            self._watched.add(watched)
        self._start()

    def remove(self, watched: Watched) -> None:
        """Stop watching an object; if it was the last one, end the watcher's thread."""
        with self._guard:
            self._watched.discard(watched)
            thread = self._thread
            if thread is None or len(self._watched):
                return
            self._thread = None
        self._wake.set()
        if thread is not threading.current_thread() and not self._is_behind:
            thread.join(_JOIN_S)

    def post(self, job: Callable[[], None]) -> None:
        """Run a job on the watcher's thread. The job must end within about a second."""
        self._jobs.append(job)
        self._start()
        self._wake.set()

    def flush(self, timeout_s: float) -> None:
        """Wait until the jobs posted so far have run or the timeout expires.

        After a timeout, later calls do not wait for the same jobs, so closing many groups costs
        only one timeout in total. The jobs still run, unless the process exits first.
        """
        if threading.current_thread() is self._thread or self._is_behind:
            return
        limit_s = time.monotonic() + timeout_s
        while self._jobs or self._running:
            if time.monotonic() >= limit_s:
                self._is_behind = True
                return
            time.sleep(0.001)

    def _start(self) -> None:
        with self._guard:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="echelon-watcher", daemon=True
                )
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def _serve(self) -> None:
        me = threading.current_thread()
        while self._thread is me or self._jobs:
            self._wake.clear()
            self._run_jobs()
            for watched in self._all():
                self._tick(watched)
                del watched
            if not self._wake.wait(_TICK_S if len(self._watched) else _LINGER_S):
                self._end_if_idle(me)

    def _all(self) -> list[Watched]:
        with self._guard:
            return list(self._watched)

    def _end_if_idle(self, me: threading.Thread) -> None:
        with self._guard:
            if not len(self._watched) and not self._jobs and self._thread is me:
                self._thread = None

    def _tick(self, watched: Watched) -> None:
        with contextlib.suppress(Exception):  # one group's error is not another's
            if watched.tick():
                return
            with self._guard:
                self._watched.discard(watched)
            if watched.tick():  # something began between the two
                with self._guard:
                    self._watched.add(watched)

    def _run_jobs(self) -> None:
        me = threading.get_ident()
        self._running.add(me)
        try:
            while self._jobs:
                with contextlib.suppress(Exception):  # a job reports its own failures
                    self._jobs.popleft()()
            self._is_behind = False
        finally:
            self._running.discard(me)


_watcher = (os.getpid(), Watcher())


def watcher() -> Watcher:
    """Return this process's watcher."""
    global _watcher
    pid, found = _watcher
    if pid != os.getpid():
        found = Watcher()
        _watcher = (os.getpid(), found)
    return found
