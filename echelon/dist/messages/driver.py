"""Run the thread that transfers the bytes of a group's messages.

Callers only append to a queue and wake the thread. Only the thread itself takes locks. Calls are
therefore safe on any thread, in a signal handler, and in a process that is about to fork. The
thread starts with the first message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol as Interface

from echelon.dist.messages.frames import FrameError
from echelon.dist.messages.protocol import Protocol
from echelon.dist.messages.transfer import Transfer
from echelon.dist.operation.operation import ANY_SOURCE

_READS_AT_ONCE = 32  # from one peer, before the others have their turn
_IDLE_S = 5.0
CHECK_EVERY_S = 0.1


class StreamBroken(Exception):  # noqa: N818 -- an event for the protocol, not an error for a user
    """Raised when a stream to or from a peer breaks."""


class Streams(Interface):
    """Ordered byte streams to and from each peer. Only `wait` blocks."""

    slice_s: float  # the longest `wait`, where `broken` has to be asked now and then

    def open(self, peer: int) -> None:
        """Open the streams to and from a peer in advance."""

    def drop(self, peer: int) -> None:
        """Close the streams to and from a peer."""

    def wait(self, timeout_s: float) -> list[int]:
        """Block until a stream is ready, `wake` is called, or the timeout expires.

        Returns:
            The peers that might have sent bytes.
        """

    def writable(self) -> list[int]:
        """Return the peers whose streams were full at the last `write` but might now have space."""

    def read(self, peer: int, view: memoryview) -> int:
        """Read a peer's bytes into `view`; return the number of bytes, which can be 0.

        Raises:
            StreamBroken: the stream has ended.
        """

    def has_unread(self, peer: int) -> bool:
        """Return whether unread bytes from a peer have arrived. Safe to call on any thread."""

    def write(self, peer: int, views: list[memoryview]) -> int:
        """Write as many bytes as fit; return how many were written.

        Raises:
            StreamBroken: the peer can no longer read the bytes.
        """

    def broken(self) -> list[tuple[int, str]]:
        """Return the peers whose streams have broken since the last call, each with the reason."""

    def wake(self) -> None:
        """Interrupt another thread's current or next `wait`."""

    def close(self) -> None:
        """Release all resources.

        The driver's thread calls this method. If that thread never started, the thread that closes
        the driver calls it.
        """


Lost = Callable[[int, str], BaseException]


class Driver:
    """The thread that runs a group's message protocol over the group's streams."""

    def __init__(self, name: str, protocol: Protocol, streams: Streams, lost: Lost) -> None:
        """Create the driver; `lost(peer, why)` creates the error for transfers with a lost peer."""
        self._name = name
        self._protocol = protocol
        self._streams = streams
        self._lost = lost
        self._posted: deque[Transfer] = deque()
        self._thread: dict[str, threading.Thread] = {}  # empty, or the one
        self._is_asleep = False
        self._end: BaseException | None = None
        self._has_ended = False
        self._live: list[Transfer] = []
        self._look_at_s = 0.0

    def post(self, transfer: Transfer) -> None:
        """Start a send or a receive; never blocks."""
        if transfer.operation.kind == "recv":
            transfer.has_unread = self._may_have_unread
        self._posted.append(transfer)
        if not self._thread:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            # setdefault decides atomically which of several callers starts its thread.
            if self._thread.setdefault("driver", thread) is thread:
                thread.start()
        elif self._has_ended:
            self._refuse_posted()
        elif self._is_asleep:
            self._streams.wake()

    def cut(self, error: BaseException) -> None:
        """Fail all current and future transfers with `error`, without blocking."""
        if self._end is None:
            self._end = error
        self._streams.wake()

    def close(self, timeout_s: float, error: BaseException | None = None) -> bool:
        """Fail all unfinished transfers, wait for the thread to end, and release the streams.

        Args:
            timeout_s: the maximum time in seconds to wait for the thread.
            error: the error with which the transfers fail, unless `cut` has already been called.

        Returns:
            True if the thread ended in time.
        """
        self.cut(error or RuntimeError("the messages of the group are closed"))
        none = threading.Thread(name=self._name)
        thread = self._thread.setdefault("driver", none)
        if thread is none:
            self._finish()
        elif thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        return not thread.is_alive()

    def _may_have_unread(self, peer: int) -> bool:
        """Return whether there might be bytes from a peer that no receive has taken yet.

        The result is True if a stream has unread bytes, or if the driver's thread is awake and
        therefore might be processing bytes that it has read. Safe to call from any thread.
        """
        if self._streams.has_unread(peer):
            return True
        if threading.current_thread() is self._thread.get("driver"):
            return False
        return bool(self._posted) or not self._is_asleep

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._end is None:
                self._turn()
        except Exception as err:  # noqa: BLE001 -- an internal error must not leave callers waiting
            self._end = err
        self._finish()

    def _finish(self) -> None:
        assert self._end is not None
        self._protocol.end(self._end)
        self._has_ended = True
        self._refuse_posted()
        self._streams.close()

    def _refuse_posted(self) -> None:
        while self._posted:
            try:
                transfer = self._posted.popleft()
            except IndexError:  # another thread refused it
                return
            transfer.finish(self._end)

    def _turn(self) -> None:
        while self._posted:
            self._start(self._posted.popleft())
        self._push()
        self._is_asleep = True
        readable = self._streams.wait(0.0 if self._posted else self._limit_s())
        self._is_asleep = False
        for peer in readable:
            self._pull(peer)
        for peer, why in self._streams.broken():
            self._lose(peer, why)
        self._protocol.dirty.update(self._streams.writable())
        self._push()
        if time.monotonic() >= self._look_at_s:
            self._look_around()

    def _start(self, transfer: Transfer) -> None:
        peer = transfer.operation.peer
        if peer >= 0:
            self._streams.open(peer)
        if transfer.watch is not None:
            self._live.append(transfer)
        self._protocol.post(transfer)

    def _limit_s(self) -> float:
        return min(self._streams.slice_s, CHECK_EVERY_S if self._live else _IDLE_S)

    def _look_around(self) -> None:
        """End abandoned receives, and transfers that have timed out or whose peer has died.

        To detect that a peer has died, each call checks only one of the peer's transfers.
        """
        now = time.monotonic()
        self._look_at_s = now + CHECK_EVERY_S
        for transfer in self._live:
            if transfer.operation.peer == ANY_SOURCE and transfer.is_over:
                self._protocol.forget(transfer)
                transfer.finish()
        self._live = [transfer for transfer in self._live if not transfer.done]
        seen: set[int] = set()
        for transfer in self._live:
            peer = transfer.operation.peer
            if transfer.watch is None or (peer in seen and now < transfer.watch.deadline_s):
                continue
            seen.add(peer)
            try:
                transfer.check()
            except Exception as err:  # noqa: BLE001 -- it belongs to the one that waits for it
                self._protocol.forget(transfer)
                transfer.finish(err)

    def _pull(self, peer: int) -> None:
        try:
            for _ in range(_READS_AT_ONCE):
                view = self._protocol.incoming(peer)
                num_bytes = self._streams.read(peer, view)
                if not num_bytes:
                    return
                self._protocol.read(peer, view, num_bytes)
        except (StreamBroken, FrameError) as err:
            self._lose(peer, str(err))

    def _push(self) -> None:
        dirty = self._protocol.dirty
        while dirty:
            peer = dirty.pop()
            try:
                while views := self._protocol.outgoing(peer):
                    num_bytes = self._streams.write(peer, views)
                    if not num_bytes:
                        break
                    self._protocol.wrote(peer, num_bytes)
            except StreamBroken as err:
                self._lose(peer, str(err))

    def _lose(self, peer: int, why: str) -> None:
        self._streams.drop(peer)
        self._protocol.lost(peer, self._lost(peer, why))
