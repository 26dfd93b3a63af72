"""The frames of a message stream: 64 bytes of header each, some with a payload behind it.

    EAGER   a whole message: header (tag, dtype, size), then its bytes
    OFFER   a message that waits at the sender: header only; `number` identifies it
    GRANT   the receiver has a place for offer `number`: the sender may send it
    DATA    the next `size` bytes of offer `number`
    CREDIT  the receiver has taken `size` bytes of eager messages out of its memory

Each ordered pair of ranks has one stream, so frames of one rank arrive in the order in which it
wrote them; grants and credits travel in the stream of the other direction.
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
    """What a frame is."""

    EAGER = 1
    OFFER = 2
    GRANT = 3
    DATA = 4
    CREDIT = 5


class FrameError(ValueError):
    """A peer sent bytes that are not a frame, or a frame that nothing asked for."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one frame.

    Attributes:
        tag: of EAGER and OFFER; negative for channels.
        number: of OFFER, GRANT and DATA: the sender's number of the offered message.
        size: bytes of payload; of OFFER: bytes of the whole message.
        dtype: of EAGER and OFFER: the key of the dtype's name, see `dtype_key`.
    """

    kind: FrameKind
    tag: int = 0
    number: int = 0
    size: int = 0
    dtype: bytes = b""


def pack(
    kind: FrameKind, *, tag: int = 0, number: int = 0, size: int = 0, dtype: bytes = b""
) -> bytes:
    """Return a frame's header: [HEADER_BYTES]."""
    return _HEADER.pack(kind, tag, number, size, dtype)


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Read a header.

    Raises:
        FrameError: there is no frame of this kind.
    """
    kind, tag, number, size, dtype = _HEADER.unpack(data)
    try:
        return Header(FrameKind(kind), tag, number, size, dtype.rstrip(b"\0"))
    except ValueError:
        raise FrameError(f"a frame of kind {kind}") from None


def dtype_key(name: str) -> bytes:
    """Return what stands for a dtype in a header: its name, or a digest of a long one."""
    raw = name.encode()
    if len(raw) <= _DTYPE_CHARS:
        return raw
    return b"~" + hashlib.sha256(raw).hexdigest()[: _DTYPE_CHARS - 1].encode()


def dtype_name(key: bytes) -> str:
    """Return the dtype's name for an error message."""
    return key.decode("utf-8", "replace")
