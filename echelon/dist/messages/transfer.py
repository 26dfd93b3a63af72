"""Transfer: one posted send or receive, from the call to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from echelon.dist.messages.frames import dtype_key
from echelon.dist.operation.operation import ANY_SOURCE, Operation
from echelon.dist.progress.outcome import Outcome


class Watch(Protocol):
    """What bounds a transfer.

    Attributes:
        deadline_s: when it times out, on the monotonic clock.
    """

    deadline_s: float

    def check(self, needed: Callable[[], Sequence[int]] | None = None) -> None:
        """Raise what ends the transfer: its deadline, or a death among the `needed` ranks."""


def _has_none(peer: int) -> bool:  # noqa: ARG001
    return False


class Withdrawable(Protocol):
    """A receive from any rank in another engine, for the same message as one here."""

    def withdraw(self) -> bool:
        """Take it back; return False if it has a message, or has ended."""

    @property
    def source(self) -> int:
        """The group rank whose message it got; -1 while it has none."""


class Transfer(Outcome):
    """A send or a receive; the `Pending` of its operation.

    Attributes:
        operation: what the caller asked for.
        dtype: the key of its dtype's name.
        data: [num_bytes] of the caller's array, which it keeps alive.
        source: group rank that sent what a receive got; -1 until that is known.
        order: number among the posted receives of the group; the lower was posted first.
        moved: bytes that have left or arrived so far.
        watch: what bounds it; None if the thread that called it watches over it.
        rival: a receive in another engine that gets the message if this one does not.
        has_unread: whether bytes of a rank have arrived and were not read yet; any thread asks.
        is_shared: whether ranks outside this engine may answer it, too.
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
        """Decide that a receive from any rank gets a message.

        Returns:
            False if it was withdrawn, or its rival has got one.
        """
        if self.rival is not None and not self.rival.withdraw():
            return False
        return self._claims.setdefault("message", True)

    def withdraw(self) -> bool:
        """Take back a receive from any rank, which ends; return False if it has a message."""
        if self.done or self._claims.setdefault("message", False):
            return False
        self.finish()
        return True

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or waits for nothing any more since its rival has got a message."""
        return self.done or (self.rival is not None and self.rival.source >= 0)

    def needed(self) -> list[int]:
        """Return the group ranks without which it cannot end."""
        return [] if self.done else [self.operation.peer]

    def needed_alive(self) -> list[int]:
        """Return the ranks whose deaths end it: not one whose message may have arrived."""
        ranks = [rank for rank in self.needed() if not self.has_unread(rank)]
        return [] if self.done else ranks  # it may have arrived while we looked

    def check(self) -> None:
        """Raise what its watch finds; see `Watch.check`."""
        if self.watch is not None:
            self.check_with(self.watch)

    def check_with(self, watch: Watch) -> None:
        """Raise what a watch finds: a rank may send, and end before its message is read."""
        if self.operation.peer == ANY_SOURCE:
            watch.check(None)
        else:
            is_late = time.monotonic() >= watch.deadline_s
            watch.check(self.needed if is_late else self.needed_alive)
