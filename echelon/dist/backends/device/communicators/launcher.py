"""Make calls on one communicator in order, without blocking the caller.

The first call that uses a connection can block the host until all members make the same call, so
it runs on a separate thread. Later calls run on the caller's thread if no earlier call is pending.
The separate thread ends when its queue is empty.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

Job = Callable[[], bool]  # makes a call; returns whether it succeeded; does not raise


class Launcher:
    """A queue that runs jobs one at a time, in the order in which they were submitted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[Job, Hashable]] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._is_busy = False
        self._has_thread = False
        self._known: set[Hashable] = set()

    def knows(self, key: Hashable) -> bool:
        """Return whether a job with this key has succeeded.

        If so, later jobs with this key do not block.
        """
        return key in self._known

    def note(self, key: Hashable) -> None:
        """Record that a job's call with this key has succeeded. The job might still be running."""
        self._known.add(key)

    def launch(self, job: Job, key: Hashable) -> None:
        """Run a job on the caller's thread or on the launcher's thread.

        Args:
            key: identifies the connections that the job uses. Only the first use of a connection
                can block. None means that the job can block every time.
        """
        with self._changed:
            is_free = not self._is_busy and not self._jobs
            if is_free and key in self._known:
                self._is_busy = True
            else:
                self._jobs.append((job, key))
                self._start()
                return
        try:
            job()
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _start(self) -> None:
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._is_busy:
                    self._changed.wait()
                if not self._jobs:
                    self._has_thread = False
                    return
                job, key = self._jobs.popleft()
                self._is_busy = True
            succeeded = job()
            del job
            with self._changed:
                if succeeded and key is not None:
                    self._known.add(key)
                self._is_busy = False
                self._changed.notify_all()
