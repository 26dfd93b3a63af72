"""Run a job on a separate thread, so that it can be abandoned if it blocks in a library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Made = TypeVar("_Made")
_LOOK_S = 0.1
_LOOK_AGAIN_S = 0.01
_DEATH_S = 2.0  # the kernel closes a dead process's connections before it reports the death


def make_aside(
    make: Callable[[], _Made], drop: Callable[[_Made], object], check: Callable[[], None]
) -> _Made:
    """Run `make` on a separate thread, block until it ends, and return its result.

    Args:
        make: a function that might block in a library and cannot be interrupted.
        drop: a function that releases the result if the caller has stopped waiting; called on
            either thread.
        check: a function that is called every 0.1 s during the wait. If it raises an exception,
            `make_aside` raises the same exception and abandons `make` on its thread. If `make`
            raises an exception first, `check` is called for another 2 s, in case a member's death
            is the cause.

    Raises:
        Exception: an exception that `make` or `check` raised.
    """
    made: list[_Made] = []
    lock = threading.Lock()
    given_up = threading.Event()

    def job() -> None:
        one = make()
        with lock:
            made.append(one)
            is_late = given_up.is_set()
        if is_late:
            drop(one)

    aside = _Aside(job)
    try:
        while not _has_ended(aside, check):
            check()
    except BaseException:
        with lock:
            given_up.set()
            dropped = list(made)
        for one in dropped:
            drop(one)
        raise
    return made[0]


def _has_ended(aside: _Aside, check: Callable[[], None]) -> bool:
    """Wait briefly for a job, and return whether it has ended.

    Raises:
        Exception: the exception that the job raised. If `check` raises an exception within 2 s
            after the job has failed, that exception is raised instead.
    """
    try:
        return aside.wait(_LOOK_S)
    except Exception:
        limit_s = time.monotonic() + _DEATH_S
        while time.monotonic() < limit_s:
            check()
            time.sleep(_LOOK_AGAIN_S)
        raise


class _Aside:
    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        threading.Thread(target=self._run, name="echelon-aside", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the job; return whether it has ended.

        Raises:
            BaseException: an exception that the job raised.
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
