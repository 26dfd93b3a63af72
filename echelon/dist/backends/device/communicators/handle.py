"""Own a communicator and free it exactly once.

A library frees a communicator in `abort` and `destroy`, and any later use would access freed
memory. All calls therefore go through one lock. When the communicator is shut down, new calls are
rejected, blocked calls are revoked, and a separate thread frees the communicator after the last
call has returned. If a library cannot revoke calls (NCCL before 2.29, oneCCL), a blocked
communicator remains until the process exits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from echelon.dist.backends.device.library import Communicator

_QUIET_S = 0.1  # how long a call may take before the end revokes it


class HandleEnded(Exception):  # noqa: N818 -- the group's own error is what users see
    """Raised when a communicator is used during or after its shutdown."""


class Handle:
    """A communicator that is protected by a lock and freed only once."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._inside = threading.Lock()
        # The end; by `setdefault`, since a signal handler may end what its thread is ending.
        self._ends: dict[str, threading.Thread] = {}
        self._error: BaseException | None = None

    @property
    def is_ended(self) -> bool:
        """True once the shutdown has begun, after which the communicator rejects new calls."""
        return bool(self._ends)

    @property
    def error(self) -> BaseException | None:
        """The error that the library raised while freeing the communicator, or None."""
        return self._error

    @contextlib.contextmanager
    def entered(self) -> Iterator[Communicator]:
        """Give the calling thread exclusive use of the communicator within the `with` block.

        Raises:
            HandleEnded: the communicator is being or has been shut down.
        """
        with self._inside:
            if self._ends:
                raise HandleEnded
            yield self._communicator

    def failure(self) -> str:
        """Return the error that the library reports, or "" if none is known. Never blocks.

        While another thread is using the communicator, the result is "".
        """
        if self._ends or not self._inside.acquire(blocking=False):
            return ""
        try:
            return "" if self._ends else self._communicator.failure()
        finally:
            self._inside.release()

    def abort(self, wait_s: float) -> bool:
        """Abort and free the communicator; return whether it was freed within `wait_s` seconds."""
        return self._end(self._abort, wait_s)

    def destroy(self, wait_s: float) -> bool:
        """Destroy an idle communicator; return whether it was freed within `wait_s` seconds.

        The library might wait for the other members, and this wait cannot be interrupted.
        """
        return self._end(self._destroy, wait_s)

    def _end(self, free: Callable[[], None], wait_s: float) -> bool:
        mine = threading.Thread(target=free, name="echelon-device-end", daemon=True)
        ending = self._ends.setdefault("end", mine)
        if ending is mine:
            mine.start()
        with contextlib.suppress(RuntimeError):  # the thread that began the end has yet to start it
            ending.join(wait_s)
        return not ending.is_alive()

    def _abort(self) -> None:
        if not self._inside.acquire(timeout=_QUIET_S):
            with contextlib.suppress(Exception):  # the wait below is all that is left
                self._communicator.revoke()
            self._inside.acquire()
        try:
            self._communicator.abort()
        except Exception as err:  # noqa: BLE001 -- no one waits for it; `error` shows it
            self._error = err
        finally:
            self._inside.release()

    def _destroy(self) -> None:
        with self._inside:
            try:
                self._communicator.destroy()
            except Exception as err:  # noqa: BLE001 -- no one waits for it; `error` shows it
                self._error = err
