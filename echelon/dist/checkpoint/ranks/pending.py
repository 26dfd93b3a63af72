"""Run saves in the background, one at a time and, beside it, one that was overtaken.

A write may hang while the storage still completes other writes. `overtake` therefore lets the next
save begin beside the running one, which is completed if it ever ends. Only one save can be
overtaken at a time: if the next write hangs as well, the storage is at fault, and saves wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from echelon.dist import runtime
from echelon.errors import CheckpointError
from echelon.recorder import span

_GRACE_S = 5.0  # for the thread to notice its own deadline and say which rank it waited for


class PendingSave:
    """A save in progress, returned by `save(..., async_op=True)`.

    Example:
        >>> pending = save("runs/gpt", {"model": model}, async_op=True)
        >>> loss = loss_fn(model(tokens), targets)  # training continues
        >>> pending.wait(timeout_s=60)
        >>> pending.done
        True
    """

    def __init__(self, path: str, write: Callable[[float], None], timeout_s: float) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._raised = False
        self._span = span("checkpoint_write", path)
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="echelon-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once the save has succeeded or failed."""
        return not self._thread.is_alive()

    @property
    def _age_s(self) -> float:
        """How long ago the save began, in seconds."""
        return time.monotonic() - self._started_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is complete.

        Args:
            timeout_s: how long to wait; None means the save's own timeout.

        Raises:
            CheckpointError: the save was not complete in time, or it failed.
            OSError: this rank could not write its part.
        """
        limit_s = self._timeout_s + _GRACE_S - self._age_s if timeout_s is None else timeout_s
        with span("checkpoint", f"wait for {self._path}"):
            self._thread.join(max(0.0, limit_s))
        if not self.done:
            raise CheckpointError(
                (f"{self._path}: the checkpoint is still being saved after {self._age_s:.1f} s"),
                path=self._path,
            )
        self._raised = True
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[float], None]) -> None:
        try:
            with self._span:
                write(self._started_s + self._timeout_s)
        except Exception as error:  # noqa: BLE001 -- whatever it is, `wait` raises it
            self._error = error


_current: PendingSave | None = None
_overtaken: PendingSave | None = None


def start(path: str, write: Callable[[float], None], timeout_s: float) -> PendingSave:
    """Start a thread that saves by calling `write` with a deadline on the monotonic clock."""
    global _current
    _current = PendingSave(path, write, timeout_s)
    return _current


def writing_s() -> float | None:
    """Return how many seconds ago the running save began, or None if no save is running."""
    return None if _current is None or _current.done else _current._age_s


def overtake() -> None:
    """Let the running save continue beside the next one. Nothing waits for it any longer.

    Its phase ends here, so that a later failure is not attributed to this save.
    """
    global _current, _overtaken
    _overtaken, _current = _current, None
    if _overtaken is not None:
        _overtaken._span.__exit__(None)


def has_overtaken() -> bool:
    """Return whether a save that was overtaken is still running."""
    return _overtaken is not None and not _overtaken.done


def wait_until_old(age_s: float) -> None:
    """Wait until the running save has ended or began at least `age_s` ago."""
    pending = _current
    if pending is not None:
        with span("checkpoint", f"wait for {pending._path}"):
            pending._thread.join(max(0.0, age_s - pending._age_s))


def finish(*, must_end: bool = True) -> Exception | None:
    """Wait for the background save and return its error; each error is returned only once.

    If the save's thread is still running after the timeout, every call returns an error until the
    thread has ended.

    Args:
        must_end: whether it is an error if the thread is still running after the timeout.
    """
    global _current
    pending = _current
    if pending is None:
        return None
    error = None
    if not (pending.done and pending._raised):
        try:
            pending.wait()
        except Exception as raised:  # noqa: BLE001 -- all ranks raise it together
            error = raised
    if not pending.done:
        return error if must_end else None
    _current = None
    return error


@runtime.before_shutdown
def _finish_at_shutdown() -> None:
    """Wait for the last save; raise its error if it failed."""
    error = finish()
    if error is not None:
        raise error


@atexit.register
def _finish_at_exit() -> None:
    """Wait for the program's last save, and make the program fail if the save failed.

    Python ignores exceptions in exit handlers, so on failure this function ends the process itself,
    after doing the work of echelon's other exit handlers.
    """
    error = finish()
    if error is None:
        return
    sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):
        runtime.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
