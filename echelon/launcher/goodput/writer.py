"""Write the record of how a job spends its time, on a separate thread.

A file system that hangs therefore cannot block the launcher.

If several versions of the record are waiting to be written, only the newest version is written.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from echelon.launcher.goodput.facts import Job, write_job


class Writer:
    """A background writer that saves the newest version of a job's time record.

    Attributes:
        took_s: how long the last write took, in seconds.
        error: the first error; "" if no write has failed.
    """

    def __init__(self, run_dir: Path) -> None:
        self.took_s = 0.0
        self.error = ""
        self._run_dir = run_dir
        self._next: Job | None = None
        self._is_busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queue `job` to be written to disk. Never blocks on the disk."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="echelon-account", daemon=True)
                try:
                    thread.start()
                except RuntimeError as err:  # the machine allows no more threads
                    self.error = self.error or str(err)
                    return
                self._thread = thread
            self._next = job
            self._changed.notify_all()

    def flush(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for pending writes to finish; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._next or self._is_busy), wait_s)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                job, self._next, self._is_busy = self._next, None, True
            assert job is not None
            began_s = time.monotonic()
            try:
                write_job(job, self._run_dir)
            except OSError as err:
                self.error = self.error or err.strerror or str(err)
            finally:
                with self._changed:
                    self.took_s, self._is_busy = time.monotonic() - began_s, False
                    self._changed.notify_all()
