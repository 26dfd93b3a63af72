"""Send a peer the answers to its waits and the events of its watches.

If the peer does not read its replies fast enough, answers are deferred and watches are ended.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from echelon.store.state.waiters import Waiter
from echelon.store.wire import protocol as p

if TYPE_CHECKING:
    from echelon.store.server.peer import Peer

_PARKED_S: Final = 0.01  # before an answer that was put off is tried again, if nothing says when


class Deliveries:
    """The answers and events for one peer. The object is truthy if any answers are deferred."""

    __slots__ = ("_parked", "_peer")

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._parked: deque[tuple[Waiter, bytes]] = deque()

    def __bool__(self) -> bool:
        return bool(self._parked)

    def deliver(self, waiter: Waiter, gathered: bytes) -> None:
        """Answer a waiter whose wait has succeeded or failed.

        Args:
            gathered: for a gather, the encoded values, which are the same for all ranks.
        """
        if not self._parked and not self._is_full:
            self._deliver(waiter, gathered)
            return
        if not self._parked:
            self._try_later()
        self._parked.append((waiter, gathered))
        self._peer.stop_reading()

    def deliver_parked(self) -> None:
        """Deliver deferred replies until none are left or the unread replies exceed the limit."""
        while self._parked and not self._is_full:
            self._deliver(*self._parked.popleft())
        if self._parked:
            self._try_later()
        else:
            self._peer.read_on_unless_put_off()

    def push_event(self, tag: int, event: bytes) -> None:
        """Send a watch's event to the peer, or end the watch if too many bytes are unread."""
        peer = self._peer
        if self._is_full:
            peer.hub.unwatch(peer, tag)
            peer.answer_later(p.ERROR, tag, b"the watch's events were not read")
        else:
            peer.answer_later(p.EVENT, tag, event)

    def drop(self) -> None:
        """Discard the deferred answers."""
        self._parked.clear()

    @property
    def _is_full(self) -> bool:
        return self._peer.out.num_unread_bytes > self._peer.hub.limits.unread_bytes

    def _try_later(self) -> None:
        if not self._peer.is_paused:  # else the end of the pause delivers
            self._peer.hub.loop.call_later(_PARKED_S, self.deliver_parked)

    def _deliver(self, waiter: Waiter, gathered: bytes) -> None:
        peer = self._peer
        if peer.is_closed:
            return
        if not waiter.tag:
            if waiter.failure is not None:
                peer.refuse(waiter.failure)
            else:
                peer.out.put(p.WAIT_DONE)
                peer.flush()
        elif waiter.failure is not None:
            peer.answer_later(p.ERROR, waiter.tag, waiter.failure.encode())
        elif waiter.values is None:
            peer.answer_later(p.OK, waiter.tag, waiter.value)
        elif len(gathered) <= peer.hub.limits.reply_bytes:
            peer.answer_later(p.OK, waiter.tag, gathered)
        else:
            text = (
                f"the reply has {len(gathered)} bytes, but the limit is "
                f"{peer.hub.limits.reply_bytes}"
            )
            peer.answer_later(p.ERROR, waiter.tag, text.encode())
