"""Maintain a client's session with echelon's server, and replace a broken link.

`ask` sends a query that is answered immediately. `wait` sends a query that can block and is
cancelled at the deadline. `write` sends a query that is answered only if it is refused.

A query with `can_repeat=True` is retried over a new link, unless earlier writes might have been
lost. `ask` retries a query at most once, and `wait` at most twice.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from typing import Final, NoReturn

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store.client.channel import Channel
from echelon.store.client.dialer import Dialer, call
from echelon.store.client.link import Call, Link
from echelon.store.deadline import Deadline
from echelon.store.forks import keep_from_children
from echelon.store.wire import protocol as p

CANCEL_S: Final = 2.0  # how long the server may take to answer a cancelled wait


def show(key: bytes) -> str:
    """Return a key as text for error messages."""
    return key.decode("utf-8", "replace")


class WaitCancelledError(Exception):
    """Raised when the server cancels a wait at its deadline.

    Attributes:
        payload: for a barrier or gather, the server's encoded report of the arrivals so far;
            meaningless for other waits.
    """

    def __init__(self, payload: bytes) -> None:
        super().__init__()
        self.payload = payload


class Session:
    """One client's session with echelon's server, over the client's current link. Thread-safe."""

    def __init__(self, dialer: Dialer, channel: Channel) -> None:
        self.dialer = dialer
        self._link: Link | None = Link(channel)
        self._connecting = threading.Lock()
        keep_from_children(self)

    def descriptors(self) -> list[int]:
        """Return the file descriptor of the link's socket, which a forked child must release."""
        link = self._link
        return [] if link is None else [link.channel.descriptor]

    def close(self) -> None:
        """Close the link, so that calls waiting in other threads fail."""
        self.dialer.is_closed = True
        link, self._link = self._link, None
        if link is not None and self.dialer.is_in_its_process:
            link.fail("the store was closed")
        elif link is not None:
            link.channel.close()

    def link(self, operation: str, key: bytes, deadline: Deadline) -> Link:
        """Return the current link, replacing it if it no longer works.

        Raises:
            StoreError: the store is closed or belongs to another process, or the server refused an
                earlier write.
            StoreTimeoutError, StoreConnectionError: the server cannot be reached.
        """
        link = self._link
        if link is not None and link.is_idle and self.dialer.is_in_its_process:
            link.drain()  # it may have been cut while nothing was asked
        if link is not None and link.problem is None and self.dialer.is_in_its_process:
            if link.refusal is not None:
                refusal, link.refusal = link.refusal, None
                self._raise_refused(operation, key, f"an earlier write was refused: {refusal}")
            return link
        name = show(key)
        self.dialer.check_usable(operation, name)
        if not self._connecting.acquire(timeout=deadline.left_s):
            raise self.dialer.timed_out(operation, name, deadline, "another thread is connecting")
        try:
            if self._link is link or self._link is None:
                lost = 0 if link is None else link.num_unconfirmed
                if link is not None and lost:
                    self._link = None
                    self._raise_lost(operation, key, link)
                self._link = Link(self.dialer.connect(operation, name, deadline))
            return self._link
        finally:
            self._connecting.release()

    def ask(
        self,
        operation: str,
        key: bytes,
        query: int,
        body: bytes,
        deadline: Deadline,
        *,
        can_repeat: bool = False,
    ) -> bytes | None:
        """Send a query that is answered immediately.

        Returns the payload, or None for the status NOTHING.

        Raises:
            StoreError: the server refused the query.
            StoreTimeoutError, StoreConnectionError: the query was not answered.
        """
        for is_last in (not can_repeat, True):
            link = self.link(operation, key, deadline)
            started = None
            try:
                started = link.start(query, body, deadline)
                link.finish(started, deadline)
            except TimeoutError as error:
                if started is not None:
                    link.forget(started)
                raise self._timed_out(operation, key, deadline, error) from None
            except OSError:
                if is_last or link.num_unconfirmed or link.refusal or self.dialer.is_closed:
                    self._raise_lost(operation, key, link)
                continue
            except BaseException:
                if started is not None:
                    link.forget(started)
                raise
            return self._payload(operation, key, started)
        raise AssertionError("this line should be unreachable")

    def ask_all(
        self, operation: str, key: bytes, queries: list[tuple[int, bytes]], deadline: Deadline
    ) -> list[tuple[int, bytes]]:
        """Send several queries at once; return the status and payload of each answer.

        Raises:
            StoreTimeoutError, StoreConnectionError: not all queries were answered.
        """
        link = self.link(operation, key, deadline)
        calls: list[Call] = []
        try:
            calls = link.send_all(queries, deadline)
            for one in calls:
                link.finish(one, deadline)
        except TimeoutError as error:
            raise self._timed_out(operation, key, deadline, error) from None
        except OSError:
            self._raise_lost(operation, key, link)
        finally:
            for one in calls:
                if one.status is None:
                    link.forget(one)
        return [(one.status or 0, one.payload) for one in calls]

    def write(
        self, operation: str, key: bytes, query: int, body: bytes, deadline: Deadline
    ) -> None:
        """Send a query that is answered only if it is refused.

        If the query is refused, the next call raises an error.
        """
        link = self.link(operation, key, deadline)
        try:
            link.write(query, body, deadline)
        except TimeoutError as error:
            raise self._timed_out(operation, key, deadline, error) from None
        except OSError:
            self._raise_lost(operation, key, link)

    def wait(
        self,
        operation: str,
        key: bytes,
        query: int,
        body: bytes,
        deadline: Deadline,
        *,
        can_repeat: bool = False,
    ) -> bytes:
        """Send a query that can block; return the payload of its answer.

        Raises:
            WaitCancelledError: the deadline passed and the server cancelled the wait.
            StoreError: the server refused the query.
            StoreTimeoutError, StoreConnectionError: the query was not answered.
        """
        for is_last in (not can_repeat, False, True):
            link = self.link(operation, key, deadline)
            waiting = None
            try:
                waiting = link.start(query, body, deadline)
                try:
                    link.finish(waiting, deadline)
                except TimeoutError:
                    grace = Deadline(CANCEL_S)
                    link.cancel(waiting, grace)
                    link.finish(waiting, grace)
            except TimeoutError as error:
                if waiting is not None:
                    link.forget(waiting)
                raise self._timed_out(operation, key, deadline, error) from None
            except OSError:
                can_go_on = deadline.left_s > 0 and not link.refusal
                if is_last or not can_go_on or self.dialer.is_closed:
                    self._raise_lost(operation, key, link)
                continue
            except BaseException:
                if waiting is not None:  # interrupted: no caller will take what it waits for
                    link.forget(waiting)
                    with contextlib.suppress(OSError):
                        link.cancel(waiting, Deadline(CANCEL_S))
                raise
            if waiting.status == p.CANCELLED:
                raise WaitCancelledError(waiting.payload)
            payload = self._payload(operation, key, waiting)
            assert payload is not None
            return payload
        raise AssertionError("this line should be unreachable")

    # Failures.

    def _payload(self, operation: str, key: bytes, done: Call) -> bytes | None:
        if done.status == p.OK:
            return done.payload
        if done.status != p.NOTHING:
            self._raise_refused(operation, key, done.payload.decode("utf-8", "replace"))
        return None

    def _raise_refused(self, operation: str, key: bytes, why: str) -> NoReturn:
        name = show(key)
        raise StoreError(
            f"{call(operation, name)} on {self.dialer.endpoint}: {why}",
            key=name or None,
            endpoint=self.dialer.endpoint,
        )

    def _timed_out(
        self, operation: str, key: bytes, deadline: Deadline, error: TimeoutError
    ) -> StoreTimeoutError:
        return self.dialer.timed_out(operation, show(key), deadline, str(error))

    def _raise_lost(self, operation: str, key: bytes, link: Link) -> NoReturn:
        num_unconfirmed = link.take_unconfirmed()
        if link.refusal is not None:
            why = f"the server closed the connection: {link.refusal}"
        else:
            why = f"the connection broke ({link.problem})"
        raise self.dialer.lost(operation, show(key), why, num_unconfirmed)


_U64 = struct.Struct("<Q")


def one_key(wire: bytes) -> bytes:
    """Return the body of a query that concerns a single key."""
    return _U64.pack(len(wire)) + wire
