"""A save that goes on in the background, and the one such save that a process may have."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from echelon.errors import CheckpointError

_GRACE_S = 5.0  # for the thread to say itself that its time is over


class PendingSave:
    """A save under way; made by `save(..., async_op=True)`."""

    def __init__(self, path: str, write: Callable[[], None], timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="echelon-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is complete.

        Args:
            timeout_s: at most so long; None: as long as the save itself may take.

        Raises:
            CheckpointError: it is not complete in time, or it failed.
            OSError: this rank could not write.
        """
        self._thread.join(self._timeout_s + _GRACE_S if timeout_s is None else timeout_s)
        if not self.done:
            raise CheckpointError(f"{self._path}: still being saved", path=self._path)
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 -- whatever it is, `wait` raises it
            self._error = error


_current: PendingSave | None = None


def start(path: str, write: Callable[[], None], timeout_s: float) -> PendingSave:
    """Begin a save in the background."""
    global _current
    _current = PendingSave(path, write, timeout_s)
    return _current


def finish() -> Exception | None:
    """Wait for the save in the background, if there is one; return its error, once."""
    global _current
    pending, _current = _current, None
    if pending is None:
        return None
    try:
        pending.wait()
    except Exception as error:  # noqa: BLE001 -- all ranks raise it together
        return error
    return None


@atexit.register
def _finish_at_exit() -> None:
    """Let a program's last save complete; a daemon thread would be cut off."""
    error = finish()
    if error is not None:
        raise error
