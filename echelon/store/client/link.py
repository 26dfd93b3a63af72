"""Manage one connection to echelon's server, which all threads of a client share.

A query and its answer carry the same tag, so answers can arrive in any order. Instead of a separate
reader thread, one of the waiting callers reads the answers for all callers. When this caller has
received its own answer, another caller takes over.

[Note: quiet writes] `set` and similar queries carry tag 0, and the server answers them only if it
refuses them. The server executes a connection's queries in order, so the answer to a later query
confirms all earlier writes.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections import deque

from echelon.store.client.channel import Channel
from echelon.store.deadline import Deadline
from echelon.store.wire import protocol as p

_HEAD = struct.Struct("<BI")
_MAX_TAG = 0xFFFFFFFF


class Call:
    """A query in progress.

    Attributes:
        tag: the number of the query on its link.
        status: the status of the answer; None until the answer arrives.
        payload: the payload of the answer.
        frames: for a watch, the received frames that have not been consumed; otherwise None.
    """

    __slots__ = ("_num_quiet", "event", "frames", "payload", "status", "tag")

    def __init__(self, tag: int, num_quiet: int, *, is_watch: bool) -> None:
        self.tag = tag
        self.status: int | None = None
        self.payload = b""
        self.frames: deque[tuple[int, bytes]] | None = deque() if is_watch else None
        self.event: threading.Event | None = None
        self._num_quiet = num_quiet

    @property
    def is_ready(self) -> bool:
        """True if an answer or a frame is ready to be taken."""
        return self.status is not None or bool(self.frames)


class Link:
    """A connection shared by all threads of a client. Thread-safe.

    Attributes:
        problem: the reason that the link can no longer be used; None if it is usable.
        refusal: the reason that the server gave for closing the connection or refusing a quiet
            write; None if the server has done neither.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.problem: str | None = None
        self.refusal: str | None = None
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._tags = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._followers: dict[Call, None] = {}
        self._num_quiet = 0
        self._num_confirmed = 0

    def __del__(self) -> None:
        self.channel.close()

    @property
    def num_unconfirmed(self) -> int:
        """The number of quiet writes that have not been confirmed."""
        return self._num_quiet - self._num_confirmed

    def take_unconfirmed(self) -> int:
        """Return `num_unconfirmed` and reset it to 0."""
        number, self._num_confirmed = self.num_unconfirmed, self._num_quiet
        return number

    @property
    def is_idle(self) -> bool:
        """True if no request is waiting for an answer."""
        return not self._calls

    def start(self, query: int, body: bytes, deadline: Deadline, *, is_watch: bool = False) -> Call:
        """Send a query.

        Raises:
            TimeoutError: the server did not accept the query in time. A partly sent query breaks
                the link.
            OSError: the link is broken.
        """
        if not self._writing.acquire(timeout=deadline.left_s):
            raise TimeoutError("another thread is still sending a request")
        try:
            self._demand_up()
            call = Call(next(self._tags) & _MAX_TAG or 1, self._num_quiet, is_watch=is_watch)
            self._calls[call.tag] = call
            self._send(_HEAD.pack(query, call.tag) + body, deadline)
        finally:
            self._writing.release()
            self._close_if_unused()
        return call

    def send_all(self, queries: list[tuple[int, bytes]], deadline: Deadline) -> list[Call]:
        """Send several queries at once. Raises the same errors as `start`."""
        if not self._writing.acquire(timeout=deadline.left_s):
            raise TimeoutError("another thread is still sending a request")
        try:
            self._demand_up()
            calls = []
            request: list[bytes] = []
            for query, body in queries:
                call = Call(next(self._tags) & _MAX_TAG or 1, self._num_quiet, is_watch=False)
                self._calls[call.tag] = call
                calls.append(call)
                request += (_HEAD.pack(query, call.tag), body)
            self._send(b"".join(request), deadline)
        finally:
            self._writing.release()
            self._close_if_unused()
        return calls

    def write(self, query: int, body: bytes, deadline: Deadline) -> None:
        """Send a query that is answered only if it is refused.

        Raises the same errors as `start`.
        """
        if not self._writing.acquire(timeout=deadline.left_s):
            raise TimeoutError("another thread is still sending a request")
        try:
            self._demand_up()
            self._num_quiet += 1
            self._send(_HEAD.pack(query, 0) + body, deadline)
        finally:
            self._writing.release()
            self._close_if_unused()

    def _send(self, data: bytes, deadline: Deadline) -> None:
        try:
            self.channel.send(data, deadline)
        except BaseException as error:  # a command may be on its way in part: nothing can follow
            self.fail(str(error) or type(error).__name__)
            raise

    def cancel(self, call: Call, deadline: Deadline) -> None:
        """Ask the server to cancel a wait or watch.

        An answer still arrives, either to the query or to the cancellation.
        """
        if not self._writing.acquire(timeout=deadline.left_s):
            raise TimeoutError("another thread is still sending a request")
        try:
            if self.problem is None:
                self._send(_HEAD.pack(p.CANCEL, call.tag), deadline)
        finally:
            self._writing.release()
            self._close_if_unused()

    def forget(self, call: Call) -> None:
        """Discard all further answers to a call."""
        self._calls.pop(call.tag, None)

    def finish(self, call: Call, deadline: Deadline) -> None:
        """Wait until a call has received its answer or, if it is a watch, a frame.

        Raises:
            TimeoutError: nothing arrived in time; `finish` can be called again.
            OSError: the link broke.
        """
        while not call.is_ready:
            if self._reading.acquire(blocking=False):
                try:
                    while not call.is_ready:
                        self._take(deadline)
                finally:
                    self._reading.release()
                    self._close_if_unused()
                    self._promote()
            else:
                self._follow(call, deadline)

    def _follow(self, call: Call, deadline: Deadline) -> None:
        """Sleep until another thread has read this call's answer or has stopped reading."""
        event = call.event = threading.Event()
        self._followers[call] = None
        try:
            # Who stops reading releases the lock first and looks for followers then.
            if not call.is_ready and self._reading.locked() and not event.wait(deadline.left_s):
                raise TimeoutError("the server did not answer")
        finally:
            self._followers.pop(call, None)
            if call.is_ready or deadline.left_s <= 0:
                self._promote()  # this thread may have been asked to read on

    def _promote(self) -> None:
        """Choose a waiting caller to read the next answers."""
        if self._followers and not self._reading.locked():
            for call in list(self._followers):
                if call.event is not None:
                    call.event.set()
                    return

    def _take(self, deadline: Deadline) -> None:
        """Read one frame and deliver it to its `Call`. The caller must hold the read lock."""
        self._demand_up()
        try:
            status, tag, payload = self.channel.take_frame(deadline)
        except TimeoutError:
            raise
        except OSError as error:
            self.fail(str(error))
            raise
        if tag == 0:
            self.refusal = payload.decode("utf-8", "replace")
            return
        call = self._calls.get(tag)
        if call is None:  # no caller waits for it any more
            return
        self._num_confirmed = max(self._num_confirmed, call._num_quiet)
        if call.frames is not None:
            call.frames.append((status, payload))
        else:
            del self._calls[tag]
            call.payload = payload
            call.status = status
        if call.event is not None:
            call.event.set()

    def drain(self) -> None:
        """Process the data that has already arrived, including the end of the stream.

        Does not wait for more data.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            while self.problem is None and self.channel.is_stale():
                self._take(Deadline(0.0))
        except OSError:
            pass
        finally:
            self._reading.release()
            self._close_if_unused()
            self._promote()

    def _demand_up(self) -> None:
        if self.problem is not None:
            raise ConnectionAbortedError(self.problem)

    def _close_if_unused(self) -> None:
        """Close the socket of a failed link once no thread is using the link."""
        if self.problem is not None and not (self._reading.locked() or self._writing.locked()):
            self.channel.close()

    def fail(self, problem: str) -> None:
        """Make all current and future calls on the link fail."""
        if self.problem is None:
            self.problem = problem
        with contextlib.suppress(OSError):
            self.channel.interrupt()
        self._close_if_unused()
        for call in list(self._followers):
            if call.event is not None:
                call.event.set()
