"""Work: the handle of an operation that may still be running."""

from __future__ import annotations

from collections.abc import Callable

from echelon.dist.backends.interface import Pending
from echelon.errors import CollectiveTimeoutError


class Work:
    """An operation in flight. `done` is truthful: True only once the result is in place."""

    __slots__ = ("_pending", "_settle", "_what", "error", "record", "settled")

    def __init__(
        self, what: str, pending: Pending, record: int, settle: Callable[[Work], None]
    ) -> None:
        self._what = what
        self._pending = pending
        self._settle = settle
        self.record = record
        self.error: BaseException | None = None
        self.settled = False

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self._pending.done

    @property
    def pending(self) -> Pending:
        """The backend's side of it."""
        return self._pending

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation has ended.

        Raises:
            CollectiveTimeoutError: it has not within `timeout_s`; it goes on and can be waited for
                again. (Without a limit the operation's own timeout bounds the wait.)
            CollectiveError: what the operation itself ended with.
        """
        if not self._pending.wait(timeout_s):
            raise CollectiveTimeoutError(f"{self._what}: not done after {timeout_s} s of wait()")
        self._settle(self)
        if self.error is not None:
            raise self.error
