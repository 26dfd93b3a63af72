"""Run a receive from any rank on two engines, exactly one of which gets the message.

[Note: one message for two receives] A receive is started on both engines, into the same array. The
state of the intra-host receive decides which engine gets the message. The intra-host engine claims
its receive when a message matches. Before the inter-host engine matches a message, it must cancel
the intra-host receive (`withdraw`). Both steps are atomic, so a message is never lost or received
twice.
"""

from __future__ import annotations

import time
from typing import Protocol

from echelon.dist.backends.interface import CHECK_EVERY_S, Pending
from echelon.dist.messages.transfer import Transfer


class Inside(Pending, Protocol):
    """A cancellable receive from a rank on the same host."""

    def withdraw(self) -> bool:
        """Cancel the receive; see `messages.transfer.Withdrawable`."""

    @property
    def source(self) -> int:
        """The sender's rank within the intra-host group; -1 until a message has been received."""


class EitherPending:
    """A receive whose message can come from a rank on this host or on another host.

    Args:
        inside: the intra-host receive; if it is cancelled, it ends with `source` still -1.
        across: the inter-host receive, which competes with `inside` for the message.
        near: the group ranks on this host, in the order of the intra-host group.
    """

    def __init__(self, inside: Inside, across: Transfer, near: list[int]) -> None:
        self._inside = inside
        self._across = across
        self._near = near

    def _ended(self) -> Pending | None:
        """Return the receive that determined the outcome, or None if it is still undetermined."""
        across, inside = self._across, self._inside
        if across.done and (across.error is not None or across.source >= 0):
            return across
        if inside.done and (inside.error is not None or inside.source >= 0):
            return inside
        return None

    @property
    def done(self) -> bool:
        """True if the receive has succeeded or failed."""
        return self._ended() is not None

    @property
    def error(self) -> BaseException | None:
        """The error with which the receive failed; None if it succeeded or has not ended."""
        ended = self._ended()
        return None if ended is None else ended.error

    @property
    def ended_mono_ns(self) -> int:
        """The monotonic time at which the receive ended, or 0 while it is running."""
        ended = self._ended()
        return 0 if ended is None else ended.ended_mono_ns

    @property
    def source(self) -> int:
        """The sender's group rank; -1 until a message has been received."""
        inside = self._inside.source if self._inside.done else -1
        return self._near[inside] if inside >= 0 else self._across.source

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the operation ends or the timeout expires; return whether it ended."""
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done:
            left_s = CHECK_EVERY_S
            if limit_s is not None:
                left_s = min(left_s, limit_s - time.monotonic())
                if left_s <= 0:
                    return False
            if self._inside.done:  # taken back: the message is on its way between the hosts
                self._across.wait(left_s)
            else:
                self._inside.wait(left_s)
        return True
