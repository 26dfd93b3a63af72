"""Share the event loop's time among the peers, in time slices.

A peer executes commands for at most one slice at a time. Its remaining work then goes to the end of
a queue, so a flood of commands from one peer does not delay other peers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

_SLICE_S: Final = 0.001  # of one peer at a time
_TURN_S: Final = 0.005  # of put-off work between two looks at the sockets


class Turns:
    """The queue of deferred work on one server.

    Args:
        clock: a function that returns the monotonic time, in seconds.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        self._slice_ends = 0.0

    def begin(self) -> None:
        """Start a time slice."""
        self._slice_ends = self._clock() + _SLICE_S

    @property
    def is_over(self) -> bool:
        """True if the current time slice is used up."""
        return self._clock() >= self._slice_ends

    def put_off(self, work: Callable[[], None]) -> None:
        """Add `work` to the end of the queue."""
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Give each waiting peer at most one time slice."""
        self._is_scheduled = False
        ends = self._clock() + _TURN_S
        try:
            for _ in range(len(self._waiting)):
                self.begin()
                self._waiting.popleft()()
                if self._clock() >= ends:
                    break
        finally:
            self._schedule()
