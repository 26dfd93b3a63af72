"""Connect and reconnect to one store server.

A new client waits up to its timeout for the server to start. If the connection breaks later, the
client tries to reconnect for 10 s, or for 1 s if the server's machine refuses the connection. The
client rejects a server that has been restarted, because the keys are lost.
"""

from __future__ import annotations

import os
import random
import time

from echelon.errors import StoreConnectionError, StoreError, StoreTimeoutError
from echelon.store.client import channel as channels
from echelon.store.client.channel import Address, Channel, Place
from echelon.store.deadline import Deadline

_FIRST_DELAY_S = 0.02
_DELAY_GROWTH = 1.5
_MAX_DELAY_S = 2.0
_RECONNECT_S = 10.0  # how long a server that was there may be away
_REFUSED_S = 1.0  # ... when its machine answers that nothing listens: the process has ended


class Dialer:
    """The part of a client that connects the client to the server.

    Attributes:
        place: the server's address and the client's credentials.
        is_closed: True once the client has been closed.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_closed = False
        self._pid = os.getpid()
        self._instance: bytes | None = None
        self._known: tuple[Address, ...] = ()

    @property
    def endpoint(self) -> str:
        """The server's address as "host:port"."""
        return f"{self.place.host}:{self.place.port}"

    @property
    def is_in_its_process(self) -> bool:
        """True if the current process created the client."""
        return self._pid == os.getpid()

    def check_usable(self, operation: str, key: str) -> None:
        """Raise an error if the client cannot be used in this process.

        Raises:
            StoreError: the client was closed, or another process created it.
        """
        if self.is_closed:
            why = "the store is closed"
        elif not self.is_in_its_process:
            why = "another process opened the store before a fork; open a new one in this process"
        else:
            return
        raise StoreError(
            f"{call(operation, key)} on {self.endpoint}: {why}",
            key=key or None,
            endpoint=self.endpoint,
        )

    def connect(self, operation: str, key: str, deadline: Deadline) -> Channel:
        """Connect to the server, retrying with growing, jittered delays until the deadline.

        A client that has been connected before stops retrying after at most 10 s.

        Raises:
            StoreTimeoutError: no server was reached before the deadline.
            StoreConnectionError: the server has stopped, has been restarted, or does not accept
                this client.
        """
        self.check_usable(operation, key)
        window_s = deadline.left_s if self._instance is None else _RECONNECT_S
        window = Deadline(min(window_s, deadline.left_s))
        started = time.monotonic()
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                channel = channels.connect(self.place, self._known, window)
                break
            except StoreError as error:
                raise type(error)(
                    f"{call(operation, key)} on {self.endpoint}: {error}",
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
                f"{call(operation, key)} on {self.endpoint}: the server was restarted, and its "
                "keys are lost. Open a new store and repeat the rendezvous",
                endpoint=self.endpoint,
            )
        self._known = (channel.peer,)
        return channel

    def _unreachable(
        self, operation: str, key: str, deadline: Deadline, error: OSError
    ) -> StoreError:
        waited_s = deadline.timeout_s - deadline.left_s
        text = (
            f"{call(operation, key)} on {self.endpoint}: no server after {waited_s:.1f} s "
            f"({error}). Check that it runs at this address and port"
        )
        if self._instance is None or deadline.left_s <= 0:
            return StoreTimeoutError(text, key=key or None, endpoint=self.endpoint)
        return StoreConnectionError(text, key=key or None, endpoint=self.endpoint)

    def timed_out(
        self, operation: str, key: str, deadline: Deadline, why: str
    ) -> StoreTimeoutError:
        """Return the error for a call that the server did not answer in time."""
        return StoreTimeoutError(
            f"{call(operation, key)} on {self.endpoint} after {deadline.timeout_s:.1f} s: {why}. "
            f"Is the server's process alive and reachable?",
            key=key or None,
            endpoint=self.endpoint,
        )

    def lost(
        self, operation: str, key: str, why: str, num_unconfirmed: int
    ) -> StoreConnectionError:
        """Return the error for a call that was in progress when the connection broke."""
        if self.is_closed:
            why = "the store was closed during the call"
        if num_unconfirmed:
            why += f"; {num_unconfirmed} earlier writes may not have arrived"
        return StoreConnectionError(
            f"{call(operation, key)} on {self.endpoint}: {why}. See the output of the process "
            "that hosts the store",
            key=key or None,
            endpoint=self.endpoint,
        )


def call(operation: str, key: str) -> str:
    """Format a call for use in error messages."""
    return f"{operation}({key!r})" if key else operation
