"""The connections of one client: who may use which, and when a broken one is replaced.

[Note: one connection for answers, others for waits] Replies carry no ids, so a connection serves
one exchange at a time. Exchanges that the server answers at once share the main connection under a
lock. A call that waits for others takes the main connection away for itself, and the next call
opens or reuses another: a program of one thread has one connection, and a blocked thread stops
nobody. Before it is taken away, commands without a reply (`set`) that are still on their way are
confirmed by a PING, so that what a thread has set is there for its own next call, whichever
connection carries it.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref

from echelon.errors import StoreConnectionError, StoreError, StoreTimeoutError
from echelon.store import channel as channels
from echelon.store import protocol as p
from echelon.store.channel import Channel
from echelon.store.deadline import Deadline
from echelon.store.forks import keep_from_children

_FIRST_DELAY_S = 0.02
_DELAY_GROWTH = 1.5
_MAX_DELAY_S = 2.0
_RECONNECT_S = 10.0  # how long a server that was there may be away
_REFUSED_S = 1.0  # ... when its machine answers that nobody listens: the process has ended
_MAX_IDLE = 4


class Connections:
    """Own the channels of one client.

    Args:
        host, port: the server; a name is resolved anew for each connection.
        secret: what both sides must know, None for an open server.
    """

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        self.host = host
        self.port = port
        self._secret = secret
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._main: Channel | None = None
        self._idle: list[Channel] = []
        self._taken: set[Channel] = set()
        self._dedicated: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._instance: bytes | None = None
        self.is_closed = False
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """Return the sockets that a forked child must not hold."""
        channels = (*self._taken, *self._idle, *self._dedicated, self._main)
        return [channel.descriptor for channel in channels if channel is not None]

    @property
    def endpoint(self) -> str:
        """The server as "host:port"."""
        return f"{self.host}:{self.port}"

    @property
    def is_ours(self) -> bool:
        """Whether the server understands our extensions."""
        return bool(self._instance)

    def open(self, deadline: Deadline) -> None:
        """Connect for the first time, however long the server takes to come up.

        Raises:
            StoreTimeoutError: it did not come up in time.
            StoreConnectionError: it is there and will not have us.
        """
        lock = self.turn("connect", "", deadline)
        try:
            self._main = self._connect("connect", "", deadline, deadline.left_s)
        finally:
            lock.release()

    def turn(self, operation: str, key: str, deadline: Deadline) -> threading.Lock:
        """Take the main connection's lock; the caller releases what is returned.

        Raises:
            StoreTimeoutError: other threads' calls hold it for too long.
            StoreError: the store is closed, or belongs to another process.
        """
        if self.is_closed or self._pid != os.getpid():
            self._check_usable(operation, key)
        if not self._lock.acquire(timeout=deadline.left_s):
            raise self.timed_out(operation, key, deadline, "another thread's call holds it")
        return self._lock

    def main(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Return the main connection, connecting if there is none; the lock is held."""
        if self._main is None:
            while self._idle:
                idle = self._idle.pop()
                if not idle.is_stale():
                    self._main = idle
                    return idle
                idle.close()
            self._main = self._connect(operation, key, deadline, _RECONNECT_S)
        return self._main

    def take_away(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Take the main connection for a call that waits; nothing is on its way on it."""
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
        """Return a connection whose exchange is complete."""
        with self._lock:
            self._taken.discard(channel)
            if self.is_closed:
                channel.close()
            elif self._main is None:
                self._main = channel
            elif len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
            else:
                channel.close()

    def drop(self, channel: Channel) -> None:
        """Close a connection whose exchange has failed."""
        self._taken.discard(channel)
        if self._main is channel:
            self._main = None
        channel.close()

    def dedicated(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Open a connection that the caller owns, for what lasts as long as it."""
        self._check_usable(operation, key)
        channel = self._connect(operation, key, deadline, _RECONNECT_S)
        self._dedicated.add(channel)
        return channel

    def close(self) -> None:
        """Close all; calls that wait in other threads fail."""
        self.is_closed = True
        forked = self._pid != os.getpid()
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

    def timed_out(
        self, operation: str, key: str, deadline: Deadline, why: str
    ) -> StoreTimeoutError:
        """Return the error of a call that the server did not answer in time."""
        return StoreTimeoutError(
            f"{_call(operation, key)} on {self.endpoint} after {deadline.timeout_s:.1f} s: {why}. "
            f"Is the server's process alive and reachable?",
            key=key or None,
            endpoint=self.endpoint,
        )

    def lost(self, operation: str, key: str, channel: Channel, error: OSError) -> StoreError:
        """Close a broken connection and return the error that says so."""
        num_unconfirmed = channel.num_unconfirmed
        self.drop(channel)
        if self.is_closed:
            why = "the store was closed meanwhile"
        else:
            why = f"the connection broke ({error})"
        if num_unconfirmed:
            why += f"; {num_unconfirmed} earlier writes may not have arrived"
        return StoreConnectionError(
            f"{_call(operation, key)} on {self.endpoint}: {why}. "
            f"See the output of the process that hosts the store",
            key=key or None,
            endpoint=self.endpoint,
        )

    def _check_usable(self, operation: str, key: str) -> None:
        if self.is_closed:
            why = "the store is closed"
        elif self._pid != os.getpid():
            why = "the store was opened before a fork, by another process: open one of your own"
        else:
            return
        raise StoreError(
            f"{_call(operation, key)} on {self.endpoint}: {why}",
            key=key or None,
            endpoint=self.endpoint,
        )

    def _confirm(self, channel: Channel, operation: str, key: str, deadline: Deadline) -> None:
        """Make sure that what was sent has arrived."""
        try:
            channel.send(p.encode(p.PING, 0), deadline)
            channel.take(4, deadline)
        except TimeoutError as error:
            self.drop(channel)
            raise self.timed_out(operation, key, deadline, str(error)) from None
        except OSError as error:
            raise self.lost(operation, key, channel, error) from None
        channel.num_unconfirmed = 0

    def _connect(self, operation: str, key: str, deadline: Deadline, window_s: float) -> Channel:
        """Connect, trying again with growing, jittered delays until the window closes."""
        window = Deadline(min(window_s, deadline.left_s))
        started = time.monotonic()
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                channel = channels.connect(self.host, self.port, self._secret, window)
                break
            except StoreError as error:
                raise type(error)(
                    f"{_call(operation, key)} on {self.endpoint}: {error}",
                    endpoint=self.endpoint,
                ) from None
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) and self._instance is not None:
                    window.at = min(window.at, started + _REFUSED_S)
                if self.is_closed or window.left_s <= delay_s:
                    raise self._unreachable(operation, key, deadline, error) from None
            time.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * _DELAY_GROWTH, _MAX_DELAY_S)
        if self._instance is None:
            self._instance = channel.instance
        elif channel.instance != self._instance:
            channel.close()
            raise StoreConnectionError(
                f"{_call(operation, key)} on {self.endpoint}: the server was restarted and its "
                f"keys are gone. Open a new store and start the rendezvous over",
                endpoint=self.endpoint,
            )
        return channel

    def _unreachable(
        self, operation: str, key: str, deadline: Deadline, error: OSError
    ) -> StoreError:
        waited_s = deadline.timeout_s - deadline.left_s
        text = (
            f"{_call(operation, key)} on {self.endpoint}: no server after {waited_s:.1f} s "
            f"({error}). Is it running, and is this its address and port?"
        )
        if self._instance is None or deadline.left_s <= 0:
            return StoreTimeoutError(text, key=key or None, endpoint=self.endpoint)
        return StoreConnectionError(text, key=key or None, endpoint=self.endpoint)


def _call(operation: str, key: str) -> str:
    return f"{operation}({key!r})" if key else operation
