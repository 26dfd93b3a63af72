"""Collect the replies to one packet of commands, and send them in one write."""

from __future__ import annotations

import asyncio
from typing import Final

from echelon.store.server.native import Receiver
from echelon.store.wire import protocol as p
from echelon.store.wire.seal import Sealer

FLUSH_BYTES: Final = 256 << 10  # replies gathered before they are handed to the transport
_JOIN_BYTES: Final = 4096  # values from here on are passed on by reference, not copied


class Outbox:
    """The unsent replies of one connection.

    Args:
        most_bytes: the number of bytes in the transport's buffer above which writing is paused.

    Attributes:
        transport: the transport that sends the replies; None before the connection is made.
        sealer: the sealer of the replies; None on an unsealed connection.
        receiver: the C core's receiver, which is notified of each write.
        num_bytes: the number of bytes that have been added but not flushed.
    """

    __slots__ = ("_most_bytes", "_pieces", "num_bytes", "receiver", "sealer", "transport")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.transport: asyncio.Transport | None = None
        self.sealer: Sealer | None = None
        self.receiver: Receiver | None = None
        self.num_bytes = 0
        self._pieces: list[bytes | memoryview] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def num_unread_bytes(self) -> int:
        """The number of reply bytes that the peer has not read yet."""
        waiting = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return self.num_bytes + waiting

    def put(self, data: bytes) -> None:
        """Add bytes to the replies."""
        self._pieces.append(data)
        self.num_bytes += len(data)

    def put_all(self, pieces: list[bytes]) -> None:
        """Add several byte strings to the replies."""
        self._pieces += pieces
        self.num_bytes += sum(map(len, pieces))

    def put_value(self, value: bytes) -> None:
        """Add a value to the replies, encoded as its length followed by its bytes."""
        length = len(value)
        if length < _JOIN_BYTES:
            self._pieces.append(p.pack_u64(length) + value)
        else:
            self._pieces += (p.pack_u64(length), value)
        self.num_bytes += length + 8

    def put_frame(self, status: int, tag: int, payload: bytes) -> None:
        """Add a frame that answers a query in echelon's own protocol."""
        length = len(payload)
        if length < _JOIN_BYTES:
            self._pieces.append(p.frame(status, tag, payload))
        else:
            self._pieces += (p.frame_header(status, tag, length), payload)
        self.num_bytes += length + p.FRAME_HEADER_BYTES

    def flush(self) -> None:
        """Pass the replies to the transport."""
        pieces, transport = self._pieces, self.transport
        if transport is None:
            self.drop()
            return
        if self.receiver is not None:
            self.receiver.may_be_queued = True
        if self.sealer is not None and self.num_bytes > FLUSH_BYTES:
            self._seal_ahead(transport, self.sealer)
            return
        size, self.num_bytes = self.num_bytes, 0
        if self.sealer is not None:
            transport.write(self.sealer.seal(b"".join(pieces)))
        elif len(pieces) == 1:
            transport.write(pieces[0])
        elif size < FLUSH_BYTES:
            transport.write(b"".join(pieces))
        else:
            transport.writelines(pieces)
        pieces.clear()

    def _seal_ahead(self, transport: asyncio.Transport, sealer: Sealer) -> None:
        """Seal and write records until the transport's buffer is full."""
        pieces = self._pieces
        while pieces and transport.get_write_buffer_size() <= self._most_bytes:
            piece = memoryview(pieces.pop(0))
            if len(piece) > FLUSH_BYTES:
                pieces.insert(0, piece[FLUSH_BYTES:])
            portion = bytes(piece[:FLUSH_BYTES])
            self.num_bytes -= len(portion)
            transport.write(sealer.seal(portion))

    def drop(self) -> None:
        """Discard the replies that have not been flushed."""
        self._pieces.clear()
        self.num_bytes = 0
