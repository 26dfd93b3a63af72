"""Run background saves: one current save and at most one superseded save at a time.

A write can hang even though the storage completes other writes. `supersede` therefore lets the next
save begin before the current save has ended, which makes the current save a superseded save. A
superseded save is completed if its write ends within the save's timeout and before the program
exits. Only one save can be superseded at a time. If the next write also hangs, the storage is at
fault, and further saves wait.
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
_UNWANTED_S = 2.0  # for the thread of a superseded save to end at the program's end

Write = Callable[[float, Callable[[], bool]], None]


class PendingSave:
    """A save in progress, returned by `save(..., async_op=True)`.

    Example:
        >>> pending = save("runs/gpt", {"model": model}, async_op=True)
        >>> loss = loss_fn(model(tokens), targets)  # training continues
        >>> pending.wait(timeout_s=60)
        >>> pending.done
        True
    """

    def __init__(self, path: str, write: Write, timeout_s: float) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._raised = False
        self._span: span | None = span("checkpoint_write", path)
        self._unwanted = threading.Event()
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
        """The time since the save began, in seconds."""
        return time.monotonic() - self._started_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is complete.

        Args:
            timeout_s: how long to wait, in seconds; None means the save's own timeout.

        Raises:
            CheckpointError: the save failed or was not completed in time.
            OSError: this rank could not write its part.
        """
        limit_s = self._ends_s - self._age_s if timeout_s is None else timeout_s
        self._join(limit_s)
        if not self.done:
            raise CheckpointError(
                (f"{self._path}: the checkpoint is still being saved after {self._age_s:.1f} s"),
                path=self._path,
            )
        self._raised = True
        if self._error is not None:
            raise self._error

    @property
    def _ends_s(self) -> float:
        """The age of the save, in seconds, at which `wait` times out by default."""
        return self._timeout_s + _GRACE_S

    def _join(self, limit_s: float) -> None:
        with span("checkpoint", f"wait for {self._path}"):
            self._thread.join(max(0.0, limit_s))

    def _run(self, write: Write) -> None:
        phase = self._span
        assert phase is not None
        phase.__enter__()
        try:
            write(self._started_s + self._timeout_s, self._unwanted.is_set)
        except Exception as error:  # noqa: BLE001 -- whatever it is, `wait` raises it
            self._error = error
        finally:
            self._end_phase()

    def _end_phase(self) -> None:
        """End the recorder's span of this save, unless another thread has already ended it."""
        with _lock:
            phase, self._span = self._span, None
        if phase is not None:
            phase.__exit__(None)


_lock = threading.Lock()
_current: PendingSave | None = None
_superseded: PendingSave | None = None


def start(path: str, write: Write, timeout_s: float) -> PendingSave:
    """Start a thread that saves by calling `write`.

    Args:
        path: the path of the checkpoint, for error messages and the black box.
        write: a function that performs the save. Its arguments are a deadline on the monotonic
            clock, and a function that returns True if the save must stop because the program is
            exiting.
        timeout_s: the timeout of the save, from which the deadline is computed.
    """
    global _current
    _current = PendingSave(path, write, timeout_s)
    return _current


def writing_s() -> float | None:
    """Return how many seconds ago the save in progress began; None if no save is in progress."""
    return None if _current is None or _current.done else _current._age_s


def has_current() -> bool:
    """Return whether there is a current save.

    A save is current until it is superseded, or until `finish` has waited for its thread to end.
    """
    return _current is not None


def is_current(save: PendingSave | None) -> bool:
    """Return whether `save` is the current save; see `has_current`."""
    return save is not None and save is _current


def supersede() -> Exception | None:
    """Let the next save begin without waiting for the current save, which is thus superseded.

    The recorder's span for the superseded save is ended, so that later failures are not attributed
    to that save.

    Returns:
        The error of the superseded save if it has already failed, otherwise None.
    """
    global _current, _superseded
    _superseded, _current = _current, None
    if _superseded is None:
        return None
    _superseded._end_phase()
    return superseded_error()


def has_superseded() -> bool:
    """Return whether a superseded save is still running."""
    return _superseded is not None and not _superseded.done


def superseded_error() -> Exception | None:
    """Return the error of the superseded save, or None. The error is returned only once."""
    if _superseded is None or not _superseded.done:
        return None
    error, _superseded._error = _superseded._error, None
    return error


def wait_until_old(age_s: float) -> None:
    """Wait until the running save has ended, has timed out or is at least `age_s` seconds old."""
    if _current is not None:
        _current._join(min(age_s, _current._ends_s) - _current._age_s)


def finish(*, must_end: bool = True) -> Exception | None:
    """Wait for the current save; return its error, or None.

    An error that `PendingSave.wait` or an earlier call has already reported is not returned again.
    If the save's thread is still running after the timeout, the save remains the current save.

    Args:
        must_end: whether to return an error if the thread is still running after the timeout. This
            error is returned by every call until the thread has ended.
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
    """Wait for the current save; raise its error if it failed."""
    error = finish()
    if error is not None:
        raise error


@atexit.register
def _finish_at_exit() -> None:
    """Wait for the program's last save, and end the program with exit code 1 if the save failed.

    Python ignores exceptions in exit handlers. On failure, this function therefore shuts down
    echelon's runtime and ends the process itself.
    """
    error = finish()
    if _superseded is not None:  # a thread in torch would abort the process while it ends
        _superseded._unwanted.set()
        _superseded._thread.join(_UNWANTED_S)
    if error is None:
        return
    sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(Exception):
        runtime.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
