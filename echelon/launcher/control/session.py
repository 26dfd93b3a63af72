"""Preserve the state of a session across reconnections, without using sockets or clocks.

Messages are numbered, and stored until the peer has acknowledged them. If a connection breaks, the
session continues on the next one, and no message is lost or delivered twice. The amount of sent but
unacknowledged data is bounded.

    frame: u64 number (0: no message; 2^64 - 1: this side is closing), u64 number of the last
           message received, message
"""

from __future__ import annotations

import struct
from collections import deque

from echelon.errors import LaunchError

WINDOW_BYTES = 4 << 20
_ACK_BYTES = WINDOW_BYTES // 4
_HEADER = struct.Struct("<QQ")
_GOODBYE = (1 << 64) - 1  # a stream that ends without it has broken


class Session:
    """The state of one end of a session."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque()  # not acknowledged yet
        self._num_sent = 0  # how many of them, on the present connection
        self._sent_bytes = 0
        self._last = 0
        self._unacknowledged_bytes = 0  # received but not acknowledged
        self.received = 0
        self.has_hung_up = False  # whether the other side has

    @property
    def is_idle(self) -> bool:
        """True once all queued messages have been sent on the current connection."""
        return self._num_sent == len(self._kept)

    @property
    def is_delivered(self) -> bool:
        """True once the peer has acknowledged all messages."""
        return not self._kept

    def owe_acknowledgement(self) -> None:
        """Make an acknowledgment due now, because the peer needs it to end its session."""
        self._unacknowledged_bytes = _ACK_BYTES

    @property
    def owes_acknowledgement(self) -> bool:
        """True if an acknowledgment is due: the peer might be waiting for it."""
        return self._unacknowledged_bytes >= _ACK_BYTES

    def put(self, message: bytes) -> None:
        """Queue a message for sending."""
        self._last += 1
        self._kept.append((self._last, message))

    def frame(self) -> bytes | None:
        """Return the next frame to send, or None if nothing can be sent at the moment."""
        if self.is_idle or self._sent_bytes >= WINDOW_BYTES:
            return None
        number, message = self._kept[self._num_sent]
        self._num_sent += 1
        self._sent_bytes += len(message)
        return self._head(number) + message

    def beat(self) -> bytes:
        """Return an empty frame, which serves as a heartbeat."""
        return self._head(0)

    def goodbye(self) -> bytes:
        """Return the frame that ends the session."""
        return self._head(_GOODBYE)

    def take(self, frame: bytes) -> bytes | None:
        """Process a received frame; return its message, or None if it contains no new message.

        Raises:
            LaunchError: a message is missing, or the bytes are not a valid frame.
        """
        if len(frame) < _HEADER.size:
            raise LaunchError("the peer sent a malformed frame")
        number, acknowledged = _HEADER.unpack_from(frame)
        self._drop(acknowledged)
        if number == _GOODBYE:
            self.has_hung_up = True
            return None
        if number == 0 or number <= self.received:
            return None
        if number != self.received + 1:
            raise LaunchError("a message from the peer is missing")
        self.received = number
        self._unacknowledged_bytes += len(frame)
        return frame[_HEADER.size :]

    def resume(self, received: int) -> None:
        """Continue on a new connection, and resend the messages that the peer has not received.

        Args:
            received: the number of the last message that the peer has received.
        """
        self._drop(received)
        self._num_sent = self._sent_bytes = 0

    def _head(self, number: int) -> bytes:
        self._unacknowledged_bytes = 0
        return _HEADER.pack(number, self.received)

    def _drop(self, acknowledged: int) -> None:
        while self._kept and self._kept[0][0] <= acknowledged:
            _, message = self._kept.popleft()
            if self._num_sent:
                self._num_sent -= 1
                self._sent_bytes -= len(message)
