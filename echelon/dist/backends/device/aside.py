"""Aside: a job on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Aside:
    """A job on a thread of its own: it may be left behind where it blocks in a library."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name="echelon-device-aside", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it; return whether it has ended.

        Raises:
            BaseException: what it raised.
        """
        if not self._has_ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._job()
        except BaseException as err:  # noqa: BLE001 -- raised by `wait`
            self._error = err
        self._has_ended.set()
