"""Match receives to messages by sender and tag.

If several receives match a message, the receive that was posted first gets it. If several messages
match a receive, the message that arrived first is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from echelon.dist.messages.transfer import Transfer
from echelon.dist.operation.operation import ANY_SOURCE


@dataclass(slots=True)
class Arrival:
    """A message that arrived or was offered before a matching receive was posted.

    Attributes:
        peer: the group rank of the sender.
        size: the size of the message in bytes.
        number: the number that the sender assigned to an offered message; -1 if the bytes have
            arrived or are in transit.
        body: the bytes of an eager message.
        is_complete: whether all of the bytes have arrived.
        taker: the receive that gets the bytes once they have arrived.
        order: the position in the order of arrival; an earlier message has a lower position.
    """

    peer: int
    tag: int
    dtype: bytes
    size: int
    number: int = -1
    body: bytearray | None = None
    is_complete: bool = False
    taker: Transfer | None = None
    order: int = 0


class Matcher:
    """One rank's posted receives and unclaimed messages. Not thread-safe."""

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[Transfer]] = {}
        self._early: dict[int, dict[int, deque[Arrival]]] = {}  # tag -> peer -> messages
        self._num_posted = 0
        self._num_early = 0

    def post(self, receive: Transfer) -> Arrival | None:
        """Return the message that matches a receive and arrived before the receive was posted.

        If no such message exists, store the receive and return None.
        """
        operation = receive.operation
        by_peer = self._early.get(operation.tag)
        if by_peer and operation.peer == ANY_SOURCE and not receive.take():
            receive.finish()
            return None
        if by_peer:
            arrival = self._take_early(by_peer, operation.peer, operation.tag)
            if arrival is not None:
                return arrival
        self._num_posted += 1
        receive.order = self._num_posted
        self._posted.setdefault((operation.peer, operation.tag), deque()).append(receive)
        return None

    def match(self, peer: int, tag: int) -> Transfer | None:
        """Remove and return the receive that matches a newly arrived message."""
        named = self._posted.get((peer, tag))
        while unnamed := self._posted.get((ANY_SOURCE, tag)):
            if named and named[0].order < unnamed[0].order:
                break
            receive = self._pop_posted((ANY_SOURCE, tag), unnamed)
            if receive.take():
                return receive
            receive.finish()
        return self._pop_posted((peer, tag), named) if named else None

    def keep(self, arrival: Arrival) -> None:
        """Store a message until a matching receive is posted."""
        self._num_early += 1
        arrival.order = self._num_early
        by_peer = self._early.setdefault(arrival.tag, {})
        by_peer.setdefault(arrival.peer, deque()).append(arrival)

    def drop_offers(self, peer: int) -> None:
        """Discard a rank's incomplete messages, because the rank will not send the rest."""
        for tag, by_peer in list(self._early.items()):
            kept = deque(one for one in by_peer.get(peer, ()) if one.is_complete)
            self._set_early(tag, by_peer, peer, kept)

    def take_receives(self, peer: int) -> list[Transfer]:
        """Remove and return the receives whose message could only come from `peer`."""
        found = []
        for key in [key for key in self._posted if key[0] == peer]:
            waiting = self._posted.pop(key)
            found += [receive for receive in waiting if not receive.is_shared]
            if kept := deque(receive for receive in waiting if receive.is_shared):
                self._posted[key] = kept
        return found

    def withdraw(self, receive: Transfer) -> None:
        """Remove a posted receive, unless it has already been matched to a message."""
        key = (receive.operation.peer, receive.operation.tag)
        waiting = self._posted.get(key, deque())
        if receive in waiting:
            waiting.remove(receive)
            if not waiting:
                del self._posted[key]

    def posted(self) -> Iterator[Transfer]:
        """Iterate over the receives that are still waiting for a message."""
        for waiting in self._posted.values():
            yield from waiting

    def _take_early(
        self, by_peer: dict[int, deque[Arrival]], peer: int, tag: int
    ) -> Arrival | None:
        if peer == ANY_SOURCE:
            peer = min(by_peer, key=lambda one: by_peer[one][0].order)
        waiting = by_peer.get(peer)
        if not waiting:
            return None
        arrival = waiting.popleft()
        self._set_early(tag, by_peer, peer, waiting)
        return arrival

    def _set_early(
        self, tag: int, by_peer: dict[int, deque[Arrival]], peer: int, waiting: deque[Arrival]
    ) -> None:
        """Store a peer's queue of early messages in `by_peer`; if the queue is empty, remove it.

        If no queues are left for the tag, the tag is removed, too.
        """
        if waiting:
            by_peer[peer] = waiting
        else:
            by_peer.pop(peer, None)
            if not by_peer:
                self._early.pop(tag, None)

    def _pop_posted(self, key: tuple[int, int], waiting: deque[Transfer]) -> Transfer:
        receive = waiting.popleft()
        if not waiting:
            del self._posted[key]
        return receive
