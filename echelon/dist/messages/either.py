"""EitherPending: a receive from any rank that two engines wait for, and one of them gets.

[Note: one message for two receives] The receive is started on both levels, into the same array.
What decides is the claim of the one inside the host: its own engine sets it when a message matches,
and the other level takes it back (`withdraw`) before it matches one, both in one atomic step. So no
message is lost and none is taken twice.
"""

from __future__ import annotations

import time
from typing import Protocol

from echelon.dist.backends.interface import CHECK_EVERY_S, Pending
from echelon.dist.messages.transfer import Transfer


class Inside(Pending, Protocol):
    """A receive inside the host, which can be taken back."""

    def withdraw(self) -> bool:
        """See `messages.transfer.Withdrawable`."""

    @property
    def source(self) -> int:
        """The group rank whose message it got, in its own group; -1 while it has none."""


class EitherPending:
    """A receive that ranks of this host and of others may answer.

    Args:
        inside: the receive inside the host; it ends without a source if it was taken back.
        across: the one between hosts, whose rival is `inside`.
        near: group ranks of this host, in the order of their group.
    """

    def __init__(self, inside: Inside, across: Transfer, near: list[int]) -> None:
        self._inside = inside
        self._across = across
        self._near = near

    def _ended(self) -> Pending | None:
        """Return the one whose end is the end of the receive; None while there is none."""
        across, inside = self._across, self._inside
        if across.done and (across.error is not None or across.source >= 0):
            return across
        if inside.done and (inside.error is not None or inside.source >= 0):
            return inside
        return None

    @property
    def done(self) -> bool:
        """Whether it has ended, with success or failure."""
        return self._ended() is not None

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None if it succeeded or has not ended."""
        ended = self._ended()
        return None if ended is None else ended.error

    @property
    def ended_mono_ns(self) -> int:
        """When it ended; 0 while it has not."""
        ended = self._ended()
        return 0 if ended is None else ended.ended_mono_ns

    @property
    def source(self) -> int:
        """The group rank whose message it got; -1 while it has none."""
        inside = self._inside.source if self._inside.done else -1
        return self._near[inside] if inside >= 0 else self._across.source

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended or the time is up; return whether it has ended."""
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
