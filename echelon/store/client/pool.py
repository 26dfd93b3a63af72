"""Manage a client's connections to torch's server.

[Note: one connection for answers, others for waits] Replies carry no IDs, so a connection serves
only one exchange at a time. Short exchanges share the main connection under a lock. A call that can
block takes over the main connection, and the next call opens or reuses another connection. Thus a
single-threaded program has one connection, and a blocked thread does not block other threads.
Before a call takes over the main connection, a PING confirms all earlier writes. A thread therefore
always reads its own writes.
"""

from __future__ import annotations

import threading

from echelon.errors import StoreError
from echelon.store.client.channel import Channel
from echelon.store.client.dialer import Dialer
from echelon.store.deadline import Deadline
from echelon.store.forks import keep_from_children
from echelon.store.wire import protocol as p

_MAX_IDLE = 4


class Pool:
    """The channels of one client.

    Args:
        dialer: the object that connects to the server.
        first: the channel whose handshake showed that the server is torch's.
    """

    def __init__(self, dialer: Dialer, first: Channel) -> None:
        self._dialer = dialer
        self._lock = threading.Lock()
        self._main: Channel | None = first
        self._idle: list[Channel] = []
        self._taken: set[Channel] = set()
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """Return the file descriptors of all sockets, which a forked child must release."""
        channels = (*self._taken, *self._idle, self._main)
        return [channel.descriptor for channel in channels if channel is not None]

    @property
    def endpoint(self) -> str:
        """The server's address as "host:port"."""
        return self._dialer.endpoint

    @property
    def is_closed(self) -> bool:
        """True once the client has been closed."""
        return self._dialer.is_closed

    def turn(self, operation: str, key: str, deadline: Deadline) -> threading.Lock:
        """Acquire and return the main connection's lock, which the caller must release.

        Raises:
            StoreTimeoutError: other threads held the lock for too long.
            StoreError: the store is closed, or belongs to another process.
        """
        self._dialer.check_usable(operation, key)
        if not self._lock.acquire(timeout=deadline.left_s):
            raise self.timed_out(
                operation, key, deadline, ("another thread is using the connection")
            )
        return self._lock

    def main(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Return the main connection, connecting if necessary. The caller must hold the lock."""
        if self._main is not None and not self._main.num_unconfirmed and self._main.is_stale():
            self.drop(self._main)  # cut while nothing was asked: nothing can be lost
        if self._main is None:
            while self._idle:
                idle = self._idle.pop()
                if not idle.is_stale():
                    self._main = idle
                    return idle
                idle.close()
            self._main = self._dialer.connect(operation, key, deadline)
        return self._main

    def take_away(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Take the main connection out of the pool for a blocking call, and return it.

        Blocks until the connection is idle and its earlier writes are confirmed.
        """
        lock = self.turn(operation, key, deadline)
        try:
            channel = self.main(operation, key, deadline)
            if channel.num_unconfirmed:
                self._confirm(channel, operation, key, deadline)
            self._main = None
            self._taken.add(channel)
        finally:
            lock.release()
        return channel

    def give_back(self, channel: Channel) -> None:
        """Return a connection to the pool after an exchange, without waiting for other calls."""
        self._taken.discard(channel)
        if not self._lock.acquire(blocking=False):
            channel.close()
            return
        try:
            if self.is_closed:
                channel.close()
            elif self._main is None:
                self._main = channel
            elif len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
            else:
                channel.close()
        finally:
            self._lock.release()

    def drop(self, channel: Channel) -> None:
        """Close a connection on which an exchange has failed."""
        self._taken.discard(channel)
        if self._main is channel:
            self._main = None
        channel.close()

    def close(self) -> None:
        """Close all connections, so that calls waiting in other threads fail."""
        self._dialer.is_closed = True
        forked = not self._dialer.is_in_its_process
        for channel in (*self._taken, *self._idle, self._main):
            if channel is None:
                continue
            if not forked and channel in self._taken:
                channel.interrupt()  # its thread closes it
            else:
                channel.close()
        self._idle.clear()
        self._main = None

    # Failures.

    def timed_out(self, operation: str, key: str, deadline: Deadline, why: str) -> StoreError:
        """Return the error for a call that the server did not answer in time."""
        return self._dialer.timed_out(operation, key, deadline, why)

    def lost(self, operation: str, key: str, channel: Channel, error: OSError) -> StoreError:
        """Close a broken connection and return the error that reports it."""
        num_unconfirmed = channel.num_unconfirmed
        self.drop(channel)
        why = f"the connection broke ({error})"
        return self._dialer.lost(operation, key, why, num_unconfirmed)

    def _confirm(self, channel: Channel, operation: str, key: str, deadline: Deadline) -> None:
        """Send PING, and block until the answer confirms all earlier writes."""
        try:
            channel.send(p.encode(p.PING, 0), deadline)
            channel.take(4, deadline)
        except TimeoutError as error:
            self.drop(channel)
            raise self.timed_out(operation, key, deadline, str(error)) from None
        except OSError as error:
            raise self.lost(operation, key, channel, error) from None
        channel.num_unconfirmed = 0
