"""Define the handle of an operation that might still be running."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from echelon.dist.errors import build
from echelon.dist.operation.checks import check_wait
from echelon.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from echelon.dist.backends.interface import Pending, Watch
    from echelon.dist.operation.operation import Operation
    from echelon.dist.progress.group_state import GroupState


class Work:
    """The handle of an operation that might still be running.

    Attributes:
        operation: the operation that was called.
        pending: the engine's handle for the operation.
        watch: the deadline and the failure checks of the operation.
        record: the operation's number in the black box.
        is_settled: True once the end of the operation has been recorded.
        failure: the error of a settled operation; None if it succeeded.

    Example:
        >>> work = world.all_reduce(np.ones(1 << 20), async_op=True)
        >>> loss = loss_fn(model(tokens), targets)  # computed during the exchange
        >>> work.wait()
        >>> work.done
        True
    """

    __slots__ = ("_state", "failure", "is_settled", "operation", "pending", "record", "watch")

    def __init__(
        self, state: GroupState, operation: Operation, pending: Pending, record: int, watch: Watch
    ) -> None:
        self._state = state
        self.operation = operation
        self.pending = pending
        self.record = record
        self.watch = watch
        self.is_settled = False
        self.failure: BaseException | None = None

    @property
    def done(self) -> bool:
        """True once the operation has succeeded or failed."""
        return self.is_settled or self.pending.done

    @property
    def error(self) -> BaseException | None:
        """The operation's error, or None if the operation has not failed.

        Reading the error can block for up to 2 s while the rank at fault is determined.
        """
        if not self.is_settled and self.pending.done:
            self._state.settle(self)
        return self.failure

    @property
    def lane(self) -> object:
        """The operation's lane.

        Operations in the same lane finish in the order in which they were called.
        """
        one = self.operation
        return (one.kind, one.peer, one.tag) if one.is_message else None

    def is_completed(self) -> bool:
        """Return whether the operation has finished, successfully or not, without blocking."""
        return self.done

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None if the operation has not failed.

        The call can block for up to 2 s.
        """
        return self.error

    @property
    def source(self) -> int:
        """The group rank that sent the received message, or -1 if no message has been received."""
        return int(getattr(self.pending, "source", -1))

    def wait(self, timeout_s: float | timedelta | None = None) -> None:
        """Block until the operation has ended or, on a device, is queued.

        For a device operation, the caller's streams then wait for the operation.

        Args:
            timeout_s: the maximum time to wait, in seconds or as a `timedelta`. None means the
                operation's own timeout; with 0, the call does not block.

        Raises:
            ValueError: `timeout_s` is negative or not a duration.
            CollectiveTimeoutError: the operation did not end within `timeout_s`. If the operation
                is still running, `wait` can be called again.
            CollectiveError: the operation itself failed.
        """
        wait_s = check_wait(timeout_s)
        if not self.is_settled and not self._state.wait(self.operation, self.pending, wait_s):
            assert wait_s is not None
            members, one = self._state.members, self.operation
            raise CollectiveTimeoutError(
                f"{build.place(members, one)}: the operation is not complete after {wait_s} s of "
                "wait(); it is still running, and wait() can be called again",
                group=members.name,
                operation=one.kind,
                sequence=one.sequence,
            )
        self._state.settle(self)
        if self.failure is not None:
            raise self.failure
