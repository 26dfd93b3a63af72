"""Connect an agent's event loop to the coordinator.

The coordinator's own node uses a `LocalLink`, which needs neither a network nor a thread. All other
nodes use `client.GrpcLink`. The event loop sends events through its link, watches `fileno()`, and
takes the commands that have arrived.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from echelon.launcher.control.messages import Command, Event

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """A queue with a file descriptor that a select loop can watch. Any thread can call `put`."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._lock = threading.Lock()
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when items might have arrived."""
        return self._read_end

    @property
    def num_waiting(self) -> int:
        """The number of items in the queue."""
        return len(self._items)

    def put(self, item: _T) -> None:
        """Add an item. After `close`, items are dropped."""
        with self._lock:
            if self._closed:
                return
            if not self._items:
                os.write(self._write_end, b"x")
            self._items.append(item)

    def take(self) -> list[_T]:
        """Remove and return the items that have arrived."""
        with self._lock:
            if not self._items:
                return []
            os.read(self._read_end, 16)
            items = list(self._items)
            self._items.clear()
            return items

    def close(self) -> None:
        """Close the pipe. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read_end)
                os.close(self._write_end)


class Link(Protocol):
    """An agent's end of its connection to the coordinator."""

    @property
    def is_connected(self) -> bool:
        """True once the coordinator has been reached."""

    def send(self, event: Event) -> None:
        """Send an event without blocking."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when commands might have arrived."""

    def take(self) -> list[Command | None]:
        """Return the commands that have arrived, followed by None if the coordinator is lost."""

    def close(self) -> None:
        """Close the link."""


class LocalLink:
    """The link between the coordinator and the agent of its own node."""

    def __init__(self, deliver: Callable[[Event], None]) -> None:
        self._deliver = deliver
        self.commands: Mailbox[Command | None] = Mailbox()

    @property
    def is_connected(self) -> bool:
        """Always True: the coordinator is in this process."""
        return True

    def send(self, event: Event) -> None:
        """Deliver an event to the coordinator."""
        self._deliver(event)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when commands have arrived."""
        return self.commands.fileno()

    def take(self) -> list[Command | None]:
        """Return the commands that have arrived since the last call."""
        return self.commands.take()

    def close(self) -> None:
        """Close the mailbox."""
        self.commands.close()
