"""Define a transfer: one send or receive in progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from echelon.dist.messages.frames import dtype_key
from echelon.dist.operation.operation import ANY_SOURCE, Operation
from echelon.dist.progress.outcome import Outcome


class Watch(Protocol):
    """The conditions under which a transfer is aborted: a deadline, and the death of a rank.

    Attributes:
        deadline_s: the monotonic time at which the transfer times out.
    """

    deadline_s: float

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise an error if the deadline has passed or any rank returned by `needed` has died."""


def _has_none(peer: int) -> bool:  # noqa: ARG001
    return False


class Withdrawable(Protocol):
    """A receive from any rank, in another engine, that competes with a receive in this engine."""

    def withdraw(self) -> bool:
        """Cancel the receive; return False if it already has a message or has ended."""

    @property
    def source(self) -> int:
        """The group rank that sent the message; -1 until a message has been received."""


class Transfer(Outcome):
    """A send or receive in progress; it serves as the `Pending` of its operation.

    Attributes:
        operation: the caller's operation.
        dtype: the key of the dtype's name.
        data: [num_bytes], a view of the caller's array, which the view keeps alive.
        source: the group rank that sent a receive's message; -1 until known.
        order: the position among the group's posted receives; an earlier receive has a lower
            position.
        moved: the number of bytes that have been sent or received so far.
        watch: the limits of the transfer; None if the calling thread checks them.
        rival: a receive in another engine that competes with this receive for one message.
        has_unread: a function that returns whether unread bytes from a rank have arrived; can be
            called on any thread.
        is_shared: whether the message can also arrive through another engine.
    """

    __slots__ = (
        "_claims", "data", "dtype", "has_unread", "is_shared", "moved", "operation", "order",
        "rival", "source", "watch",
    )  # fmt: skip

    def __init__(self, operation: Operation, watch: Watch | None = None) -> None:
        flat = operation.source if operation.kind == "send" else operation.target
        assert flat is not None, operation
        super().__init__()
        self.operation = operation
        self.dtype = dtype_key(operation.dtype)
        raw: Any = flat.view(np.uint8)
        self.data = memoryview(raw)
        self.source = -1
        self.order = 0
        self.moved = 0
        self.watch = watch
        self.rival: Withdrawable | None = None
        self.is_shared = False
        self.has_unread: Callable[[int], bool] = _has_none
        self._claims: dict[str, bool] = {}  # empty, or whether it gets a message: see `take`

    def take(self) -> bool:
        """Claim a message for a receive that accepts messages from any rank.

        Returns:
            False if the receive was cancelled, or if the competing receive in another engine
            already has a message.
        """
        if self.rival is not None and not self.rival.withdraw():
            return False
        return self._claims.setdefault("message", True)

    def withdraw(self) -> bool:
        """Cancel and end a receive from any rank; return False if it already has a message."""
        if self.done or self._claims.setdefault("message", False):
            return False
        self.finish()
        return True

    @property
    def is_over(self) -> bool:
        """True if the transfer has ended, or if the competing receive has taken the message."""
        return self.done or (self.rival is not None and self.rival.source >= 0)

    def needed(self) -> list[int]:
        """Return the group ranks without which the transfer cannot complete."""
        return [] if self.done else [self.operation.peer]

    def needed_alive(self) -> list[int]:
        """Return the group ranks whose death aborts the transfer.

        The transfer still needs these ranks and has already read everything that they sent, so it
        cannot complete without them.
        """
        ranks = [rank for rank in self.needed() if not self.has_unread(rank)]
        return [] if self.done else ranks  # it may have arrived while we looked

    def check(self) -> None:
        """Raise an error if the transfer's watch requires an abort; see `Watch.check`."""
        if self.watch is not None:
            self.check_with(self.watch)

    def check_with(self, watch: Watch) -> None:
        """Check the transfer against `watch`, as in `Watch.check`.

        Before the deadline, the death of another rank is ignored as long as bytes from that rank
        are unread, because those bytes might complete the transfer.
        """
        if self.operation.peer == ANY_SOURCE:
            watch.check(None)
        else:
            is_late = time.monotonic() >= watch.deadline_s
            watch.check(self.needed if is_late else self.needed_alive)
