"""The store's wire protocol: bytes to messages and back, with no I/O.

A connection is a raw stream of commands with no framing, no ids and no error replies, because it
is the protocol that PyTorch's TCPStore speaks; integers are little-endian, a string is a u64 length
and its bytes. Queries from 0x40 on are ours and are understood only after the client has sent PING
with `OUR_NONCE`, which our server answers with the complement and torch's server with an echo.

`parser` reads the commands; here are the numbers, the encoders, and the readers of replies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final

from echelon.errors import StoreProtocolError

# torch's queries.
VALIDATE: Final = 0x00
SET: Final = 0x01
COMPARE_SET: Final = 0x02
GET: Final = 0x03
ADD: Final = 0x04
CHECK: Final = 0x05
WAIT: Final = 0x06
NUM_KEYS: Final = 0x07
DELETE_KEY: Final = 0x08
APPEND: Final = 0x09
MULTI_GET: Final = 0x0A
MULTI_SET: Final = 0x0B
CANCEL_WAIT: Final = 0x0C
PING: Final = 0x0D
QUEUE_PUSH: Final = 0x0E
QUEUE_POP: Final = 0x0F
QUEUE_LEN: Final = 0x10
LIST_KEYS: Final = 0x11
BARRIER: Final = 0x12

# Ours. Every one is answered by a frame: u8 status, u64 length, payload.
HELLO: Final = 0x40  # S client nonce, i64 protocol version
PROOF: Final = 0x41  # S mac
CANCEL: Final = 0x42  # withdraw what this connection waits for
GATHER: Final = 0x43  # S key, i64 rank, i64 world size, S value
ARRIVE: Final = 0x44  # S key, i64 rank (-1: unnamed), i64 world size
ACK_SET: Final = 0x45  # S key, S value
ACK_ADD: Final = 0x46  # S key, i64 amount
AWAIT_GET: Final = 0x47  # S key
AWAIT_POP: Final = 0x48  # S key
WATCH: Final = 0x49  # u64 n, n * S key
PRESENCE: Final = 0x4A  # S key, S value
STATISTICS: Final = 0x4B

NAMES: Final[dict[int, str]] = {
    value: name
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, int)
}

VALIDATE_MAGIC: Final = 0x3C85F7CE
OUR_NONCE: Final = 0xEC4E0001
OUR_ANSWER: Final = OUR_NONCE ^ 0xFFFFFFFF
EXTENSION_VERSION: Final = 2

# Status byte of a reply frame.
OK: Final = 0
ERROR: Final = 1  # payload: one line of text
CANCELLED: Final = 2  # payload: of a round its world size, how many came, the missing ranks (i64)
NOTHING: Final = 3  # nothing was there to cancel
EVENT: Final = 4  # pushed: a watched key changed; payload: u8 present, S key, S value

# torch's one-byte answers.
WAIT_DONE: Final = b"\x00"
WAIT_CANCELLED: Final = b"\x01"
CHECK_PRESENT: Final = b"\x00"
CHECK_MISSING: Final = b"\x01"

Message = tuple[object, ...]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_FRAME = struct.Struct("<BQ")

FRAME_HEADER_BYTES: Final = _FRAME.size


# Encoders of one integer each: unsigned 64, signed 64, unsigned 32 bits.
pack_u64: Final[Callable[[int], bytes]] = _U64.pack
pack_i64: Final[Callable[[int], bytes]] = _I64.pack
pack_u32: Final[Callable[[int], bytes]] = _U32.pack


def unpack_u64(data: bytes) -> int:
    """Decode an unsigned 64-bit integer."""
    (number,) = _U64.unpack(data)
    assert isinstance(number, int)
    return number


def unpack_i64(data: bytes) -> int:
    """Decode a signed 64-bit integer."""
    (number,) = _I64.unpack(data)
    assert isinstance(number, int)
    return number


def pack_string(data: bytes) -> bytes:
    """Encode a string: its length and its bytes."""
    return _U64.pack(len(data)) + data


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Encode strings one after the other, without their count."""
    pack = _U64.pack
    pieces: list[bytes] = []
    for data in strings:
        pieces += (pack(len(data)), data)
    return b"".join(pieces)


def unpack_strings(data: bytes, position: int = 0) -> list[bytes]:
    """Decode all strings of a payload from `position` to its end.

    Raises:
        StoreProtocolError: the payload does not consist of whole strings.
    """
    strings: list[bytes] = []
    while position < len(data):
        if position + 8 > len(data):
            raise StoreProtocolError("reply cut short inside a length")
        end = position + 8 + _U64.unpack_from(data, position)[0]
        if end > len(data):
            raise StoreProtocolError("reply cut short inside a string")
        strings.append(data[position + 8 : end])
        position = end
    return strings


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Encode i64 values one after the other."""
    return b"".join(map(_I64.pack, numbers))


def unpack_integers(data: bytes) -> list[int]:
    """Decode a payload of i64 values; a trailing fragment is ignored."""
    return [number for (number,) in _I64.iter_unpack(data[: len(data) // 8 * 8])]


def frame(status: int, payload: bytes = b"") -> bytes:
    """Encode a reply to one of our queries."""
    return _FRAME.pack(status, len(payload)) + payload


def unpack_frame_header(data: bytes) -> tuple[int, int]:
    """Decode (status, payload length) of a reply frame."""
    status, length = _FRAME.unpack(data)
    return status, length


def encode(query: int, *fields: bytes | int | list[bytes]) -> bytes:
    """Encode one command: bytes as a string, int as i64, a list as its count and strings.

    MULTI_SET's list holds keys and values alternating; PING and VALIDATE take a u32.
    """
    pieces = [bytes((query,))]
    for field in fields:
        if isinstance(field, bytes):
            pieces.append(pack_string(field))
        elif isinstance(field, int):
            pieces.append(_U32.pack(field) if query in (PING, VALIDATE) else _I64.pack(field))
        else:
            count = len(field) // 2 if query == MULTI_SET else len(field)
            pieces += (_U64.pack(count), pack_strings(field))
    return b"".join(pieces)
