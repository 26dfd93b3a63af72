"""Encode the frames of a message stream, each with a 64-byte header and possibly a payload.

    EAGER   a whole message: header (tag, dtype, size), then its bytes
    OFFER   a message that is waiting at the sender: header only; `number` identifies it
    GRANT   the receiver has memory for offer `number`, so the sender can send the message
    DATA    the next `size` bytes of offer `number`
    CREDIT  the receiver has consumed `size` bytes of eager messages, including their headers

Each ordered pair of ranks has one stream, so frames arrive in the order in which they were sent.
Grants and credits travel on the stream in the opposite direction.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<B3xiQQ8x32s")
_DTYPE_CHARS = 32
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 64


class FrameKind(IntEnum):
    """The kind of a frame."""

    EAGER = 1
    OFFER = 2
    GRANT = 3
    DATA = 4
    CREDIT = 5


class FrameError(ValueError):
    """Raised when a peer sends an unexpected frame, or bytes that are not a frame."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame.

    Attributes:
        tag: in EAGER and OFFER, the message's tag; negative for channels.
        number: in OFFER, GRANT and DATA, the number that the sender gave to the offered message.
        size: the size of the payload in bytes; in OFFER, the size of the whole message; in CREDIT,
            the number of bytes credited.
        dtype: in EAGER and OFFER, the key of the dtype's name (see `dtype_key`).
    """

    kind: FrameKind
    tag: int = 0
    number: int = 0
    size: int = 0
    dtype: bytes = b""


def pack(
    kind: FrameKind, *, tag: int = 0, number: int = 0, size: int = 0, dtype: bytes = b""
) -> bytes:
    """Encode a frame's header: [HEADER_BYTES]."""
    return _HEADER.pack(kind, tag, number, size, dtype)


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Decode a frame's header.

    Raises:
        FrameError: the kind of frame is unknown.
    """
    kind, tag, number, size, dtype = _HEADER.unpack(data)
    try:
        return Header(FrameKind(kind), tag, number, size, dtype.rstrip(b"\0"))
    except ValueError:
        raise FrameError(f"the peer sent a frame of unknown kind {kind}") from None


def dtype_key(name: str) -> bytes:
    """Return the key that represents a dtype in a header: its name, or a digest of a long name."""
    raw = name.encode()
    if len(raw) <= _DTYPE_CHARS:
        return raw
    return b"~" + hashlib.sha256(raw).hexdigest()[: _DTYPE_CHARS - 1].encode()


def dtype_name(key: bytes) -> str:
    """Return the name of a dtype for an error message, given the dtype's key."""
    return key.decode("utf-8", "replace")
