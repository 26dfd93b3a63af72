"""Implement the message protocol between two ranks as a state machine without I/O.

A small message is sent immediately (EAGER). A message that is large, or would exceed the memory
granted by the receiver, is offered first. Once a receive has claimed an offered message, the
message is transferred directly into the receiver's array. Sends with different tags therefore
complete in the order in which the receiver takes the messages. Messages that arrive before their
receives are posted use at most `WINDOW_BYTES` of a rank's memory per sending peer, plus a 64-byte
header for each message that is waiting at its sender.

A stream's bytes are always read, even if no receive is posted, so messages cannot block each other.
Offered messages take turns sending `CHUNK_BYTES` each, so a small message never waits for an entire
large message.

A single thread (driver.py) drives the state machine, which therefore needs no locks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from echelon.dist.messages import frames
from echelon.dist.messages.frames import HEADER_BYTES, FrameError, FrameKind, Header
from echelon.dist.messages.matching import Arrival, Matcher
from echelon.dist.messages.transfer import Transfer
from echelon.dist.operation.operation import ANY_SOURCE

EAGER_BYTES = 256 << 10
WINDOW_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 64 << 10  # read at once; a payload longer than a quarter goes straight to its place
_FRAMES_AT_ONCE = 16

Mismatch = Callable[[Transfer, str], BaseException]


@dataclass(slots=True)
class _Frame:
    """An outgoing frame.

    Attributes:
        views: the bytes that have not been written yet.
        ends: the transfer that finishes once the frame has been written, or None.
    """

    views: list[memoryview]
    ends: Transfer | None = None


@dataclass(slots=True)
class _Outbox:
    """The frames that are waiting to be written to one peer."""

    credit: int = WINDOW_BYTES
    queued: deque[_Frame] = field(default_factory=deque)
    granted: deque[tuple[int, Transfer]] = field(default_factory=deque)
    writing: deque[_Frame] = field(default_factory=deque)


@dataclass(slots=True)
class _Inbox:
    """The frame that is being read from one peer."""

    header: bytearray = field(default_factory=bytearray)
    body: memoryview | None = None  # where the rest of the payload goes
    ends: Callable[[], None] | None = None
    into: Transfer | Arrival | None = None
    owed: int = 0  # eager bytes taken and not yet credited


class Protocol:
    """The state of the messages between one rank and its peers.

    Attributes:
        dirty: the peers to which new data must be written.
    """

    def __init__(self, size: int, mismatch: Mismatch) -> None:
        """Create the state of a rank in a group of `size` ranks.

        `mismatch(receive, sent)` creates the error for a receive whose dtype or size differs from
        the message's. The string `sent` describes the message.
        """
        self._num_peers = size - 1
        self._mismatch = mismatch
        self._matcher = Matcher()
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._offered: dict[tuple[int, int], Transfer] = {}  # mine, by (to, number)
        self._claimed: dict[tuple[int, int], Transfer] = {}  # receives, by (from, number)
        self._gone: dict[int, BaseException] = {}
        self._numbers = itertools.count()
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        self.dirty: set[int] = set()

    # ---- the caller's side ----

    def post(self, transfer: Transfer) -> None:
        """Start a send or a receive."""
        if transfer.operation.kind == "send":
            self._send(transfer)
        else:
            self._receive(transfer)

    def _send(self, transfer: Transfer) -> None:
        operation, size = transfer.operation, len(transfer.data)
        peer, tag = operation.peer, operation.tag
        if peer in self._gone:
            transfer.finish(self._gone[peer])
            return
        out = self._outbox(peer)
        if size <= EAGER_BYTES and size + HEADER_BYTES <= out.credit:
            out.credit -= size + HEADER_BYTES
            head = frames.pack(FrameKind.EAGER, tag=tag, size=size, dtype=transfer.dtype)
            out.queued.append(_Frame([memoryview(head), transfer.data], transfer))
        else:
            number = next(self._numbers)
            self._offered[peer, number] = transfer
            head = frames.pack(
                FrameKind.OFFER, tag=tag, number=number, size=size, dtype=transfer.dtype
            )
            out.queued.append(_Frame([memoryview(head)]))
        self.dirty.add(peer)

    def _receive(self, transfer: Transfer) -> None:
        arrival = self._matcher.post(transfer)
        if arrival is not None:
            self._deliver(transfer, arrival)
            return
        peer = transfer.operation.peer
        gone = self._gone.get(peer)
        if gone is None and peer == ANY_SOURCE and len(self._gone) == self._num_peers:
            gone = next(iter(self._gone.values()))
        if gone is not None:
            self._end_receives(peer, gone)

    def _deliver(self, receive: Transfer, arrival: Arrival) -> None:
        """Deliver a message that had arrived or been offered before its receive was posted."""
        if arrival.number < 0:
            self._credit(arrival.peer, arrival.size)
        if not self._fits(receive, arrival.peer, arrival.dtype, arrival.size):
            return
        if arrival.number >= 0:
            self._claim(receive, arrival.peer, arrival.number)
        elif arrival.is_complete:
            _copy(receive, arrival)
        else:
            arrival.taker = receive

    # ---- what goes out ----

    def outgoing(self, peer: int) -> list[memoryview]:
        """Return the next bytes to write to a peer.

        Until `wrote` is called, every call returns the same bytes.
        """
        out = self._outboxes.get(peer)
        if out is None:
            return []
        if not out.writing:
            for _ in range(min(_FRAMES_AT_ONCE, len(out.queued))):
                out.writing.append(out.queued.popleft())
            if out.granted:
                out.writing.append(self._next_chunk(out))
        return [view for frame in out.writing for view in frame.views]

    def wrote(self, peer: int, num_bytes: int) -> None:
        """Record that the first `num_bytes` bytes that `outgoing` returned have been written."""
        out = self._outboxes[peer]
        while out.writing:
            frame = out.writing[0]
            while frame.views and num_bytes >= len(frame.views[0]):
                num_bytes -= len(frame.views.pop(0))
            if frame.views:
                frame.views[0] = frame.views[0][num_bytes:]
                return
            out.writing.popleft()
            if frame.ends is not None:
                frame.ends.finish()

    def _next_chunk(self, out: _Outbox) -> _Frame:
        number, transfer = out.granted.popleft()
        chunk = transfer.data[transfer.moved : transfer.moved + CHUNK_BYTES]
        transfer.moved += len(chunk)
        is_last = transfer.moved == len(transfer.data)
        if not is_last:
            out.granted.append((number, transfer))
        head = frames.pack(FrameKind.DATA, number=number, size=len(chunk))
        return _Frame([memoryview(head), chunk], transfer if is_last else None)

    # ---- what comes in ----

    def incoming(self, peer: int) -> memoryview:
        """Return the buffer for a peer's next bytes; call `read` after writing bytes into it."""
        body = self._inbox(peer).body
        return self._block if body is None or len(body) < _BLOCK_BYTES // 4 else body

    def read(self, peer: int, view: memoryview, num_bytes: int) -> None:
        """Process the bytes that were read into `view`, which `incoming` returned.

        Raises:
            FrameError: the bytes violate the protocol.
        """
        inbox = self._inbox(peer)
        if view is self._block:
            self._parse(peer, inbox, view[:num_bytes])
        else:
            assert inbox.body is not None
            self._advance(inbox, inbox.body[num_bytes:])

    def _parse(self, peer: int, inbox: _Inbox, data: memoryview) -> None:
        while data:
            if inbox.body is not None:
                count = min(len(data), len(inbox.body))
                inbox.body[:count] = data[:count]
                data = data[count:]
                self._advance(inbox, inbox.body[count:])
                continue
            count = min(len(data), HEADER_BYTES - len(inbox.header))
            inbox.header += data[:count]
            data = data[count:]
            if len(inbox.header) == HEADER_BYTES:
                header = frames.unpack(inbox.header)
                inbox.header = bytearray()
                self._begin(peer, inbox, header)

    def _advance(self, inbox: _Inbox, rest: memoryview) -> None:
        inbox.body = rest
        if not rest:
            ends, inbox.body, inbox.ends, inbox.into = inbox.ends, None, None, None
            if ends is not None:
                ends()

    def _begin(self, peer: int, inbox: _Inbox, header: Header) -> None:
        if header.kind == FrameKind.EAGER:
            self._begin_eager(peer, inbox, header)
        elif header.kind == FrameKind.OFFER:
            self._take_offer(peer, header)
        elif header.kind == FrameKind.DATA:
            self._begin_data(peer, inbox, header)
        elif header.kind == FrameKind.GRANT:
            transfer = self._offered.pop((peer, header.number), None)
            if transfer is None:
                raise FrameError(f"the peer granted message {header.number}, which was not offered")
            self._outbox(peer).granted.append((header.number, transfer))
            self.dirty.add(peer)
        else:
            out = self._outbox(peer)
            out.credit = min(WINDOW_BYTES, out.credit + header.size)

    def _begin_eager(self, peer: int, inbox: _Inbox, header: Header) -> None:
        if header.size > EAGER_BYTES:
            raise FrameError(f"the peer sent {header.size} bytes that it had not offered")
        receive = self._matcher.match(peer, header.tag)
        if receive is None:
            early = Arrival(
                peer, header.tag, header.dtype, header.size, body=bytearray(header.size)
            )
            self._matcher.keep(early)
            self._put(inbox, memoryview(early.body or b""), early, lambda: _complete(early))
            return
        self._credit(peer, header.size)
        if self._fits(receive, peer, header.dtype, header.size):
            self._put(inbox, receive.data, receive, receive.finish)
        else:
            self._put(inbox, memoryview(bytearray(header.size)), None, lambda: None)

    def _take_offer(self, peer: int, header: Header) -> None:
        receive = self._matcher.match(peer, header.tag)
        if receive is None:
            self._matcher.keep(
                Arrival(peer, header.tag, header.dtype, header.size, number=header.number)
            )
        elif self._fits(receive, peer, header.dtype, header.size):
            self._claim(receive, peer, header.number)

    def _begin_data(self, peer: int, inbox: _Inbox, header: Header) -> None:
        receive = self._claimed.get((peer, header.number))
        if receive is None or header.size > len(receive.data) - receive.moved:
            raise FrameError(
                f"the peer sent {header.size} bytes of message {header.number}, which was not "
                "granted"
            )
        place = receive.data[receive.moved : receive.moved + header.size]
        receive.moved += header.size
        is_last = receive.moved == len(receive.data)
        if is_last:
            del self._claimed[peer, header.number]
        self._put(inbox, place, receive, receive.finish if is_last else lambda: None)

    def _put(
        self,
        inbox: _Inbox,
        body: memoryview,
        into: Transfer | Arrival | None,
        ends: Callable[[], None],
    ) -> None:
        inbox.into, inbox.ends = into, ends
        self._advance(inbox, body)

    def _fits(self, receive: Transfer, peer: int, dtype: bytes, size: int) -> bool:
        """Record the sender; return whether the message has the receive's dtype and size.

        If not, the receive fails.
        """
        receive.source = peer
        if (dtype, size) == (receive.dtype, len(receive.data)):
            return True
        sent = f"{frames.dtype_name(dtype)}, {size} bytes"
        receive.finish(self._mismatch(receive, sent))
        return False

    def _claim(self, receive: Transfer, peer: int, number: int) -> None:
        self._claimed[peer, number] = receive
        self._queue(peer, frames.pack(FrameKind.GRANT, number=number))

    def _credit(self, peer: int, size: int) -> None:
        if peer in self._gone:
            return
        inbox = self._inbox(peer)
        inbox.owed += size + HEADER_BYTES
        if inbox.owed >= WINDOW_BYTES // 4:
            self._queue(peer, frames.pack(FrameKind.CREDIT, size=inbox.owed))
            inbox.owed = 0

    def _queue(self, peer: int, head: bytes) -> None:
        self._outbox(peer).queued.append(_Frame([memoryview(head)]))
        self.dirty.add(peer)

    # ---- the end ----

    def lost(self, peer: int, error: BaseException) -> None:
        """Abort all transfers that depend on a peer whose streams have broken.

        Messages that have arrived completely can still be received.
        """
        if peer in self._gone:
            return
        self._gone[peer] = error
        self._end_receives(peer, error)
        inbox = self._inboxes.pop(peer, None)
        if inbox is not None and inbox.into is not None:
            into = inbox.into.taker if isinstance(inbox.into, Arrival) else inbox.into
            if into is not None:
                into.finish(error)
        for transfer in self._sends(self._outboxes.pop(peer, None)):
            transfer.finish(error)
        for pending in (self._offered, self._claimed):
            for key in [key for key in pending if key[0] == peer]:
                pending.pop(key).finish(error)
        self._matcher.drop_offers(peer)
        if len(self._gone) == self._num_peers:
            self._end_receives(ANY_SOURCE, error)

    def end(self, error: BaseException) -> None:
        """Fail all transfers with `error`."""
        for transfer in self.pending():
            transfer.finish(error)
        self._outboxes.clear()
        self._inboxes.clear()
        self._offered.clear()
        self._claimed.clear()
        self._matcher = Matcher()

    def forget(self, transfer: Transfer) -> None:
        """Cancel an abandoned receive, unless a message has already been assigned to it."""
        self._matcher.withdraw(transfer)

    def pending(self) -> list[Transfer]:
        """Return the transfers that have not ended yet."""
        found = [*self._offered.values(), *self._claimed.values(), *self._matcher.posted()]
        for out in self._outboxes.values():
            found += self._sends(out)
        for inbox in self._inboxes.values():
            into = inbox.into.taker if isinstance(inbox.into, Arrival) else inbox.into
            found += [] if into is None else [into]
        return [transfer for transfer in found if not transfer.done]

    def _end_receives(self, peer: int, error: BaseException) -> None:
        for receive in self._matcher.take_receives(peer):
            receive.finish(error)

    @staticmethod
    def _sends(out: _Outbox | None) -> Iterator[Transfer]:
        if out is not None:
            for frame in itertools.chain(out.writing, out.queued):
                if frame.ends is not None:
                    yield frame.ends
            for _, transfer in out.granted:
                yield transfer

    def _outbox(self, peer: int) -> _Outbox:
        out = self._outboxes.get(peer)
        if out is None:
            out = self._outboxes[peer] = _Outbox()
        return out

    def _inbox(self, peer: int) -> _Inbox:
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = _Inbox()
        return inbox


def _complete(early: Arrival) -> None:
    early.is_complete = True
    if early.taker is not None:
        _copy(early.taker, early)


def _copy(receive: Transfer, arrival: Arrival) -> None:
    receive.data[:] = arrival.body or b""
    receive.finish()
