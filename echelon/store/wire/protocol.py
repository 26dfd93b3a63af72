"""Encode and decode the store's wire protocol, without I/O.

The protocol is that of PyTorch's TCPStore: a raw stream of commands without framing, IDs or error
replies. Integers are little-endian. A string is a u64 length followed by its bytes. Queries whose
command byte is 0x80 or higher are echelon's own and carry a tag. In the handshake, a client sends
PING with `OUR_NONCE`; echelon's server replies with the nonce's complement.
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

# Ours: from TAGGED on, a query byte is followed by a u32 tag, which its answer carries. Each is
# answered by one frame: u8 status, u32 tag, u64 length, payload. Tag 0 asks for no answer unless
# the query is refused.
TAGGED: Final = 0x80
ACK_SET: Final = TAGGED | SET  # S key, S value
ACK_COMPARE_SET: Final = TAGGED | COMPARE_SET  # S key, S expected, S desired -> value
GET_IF: Final = TAGGED | GET  # S key -> value, or NOTHING
ACK_ADD: Final = TAGGED | ADD  # S key, i64 amount -> i64 sum
CHECK_EACH: Final = TAGGED | CHECK  # u64 n, n * S key -> n * u8, 1 where it exists
AWAIT: Final = TAGGED | WAIT  # u64 n, n * S key -> nothing, once all exist
ACK_NUM_KEYS: Final = TAGGED | NUM_KEYS  # -> i64
ACK_DELETE: Final = TAGGED | DELETE_KEY  # S key -> i64 0/1
ACK_APPEND: Final = TAGGED | APPEND  # S key, S value
AWAIT_MULTI_GET: Final = TAGGED | MULTI_GET  # u64 n, n * S key -> n * S, once all exist
ACK_MULTI_SET: Final = TAGGED | MULTI_SET  # u64 n, n * (S key, S value)
CANCEL: Final = (
    TAGGED | CANCEL_WAIT
)  # withdraw the wait or watch of this tag; answered by its frame
ACK_PING: Final = TAGGED | PING  # -> nothing
ACK_PUSH: Final = TAGGED | QUEUE_PUSH  # S key, S value
POP_IF: Final = TAGGED | QUEUE_POP  # S key -> item, or NOTHING
ACK_QUEUE_LEN: Final = TAGGED | QUEUE_LEN  # S key -> i64
ACK_LIST_KEYS: Final = TAGGED | LIST_KEYS  # -> n * S
HELLO: Final = 0xC0  # S client nonce, i64 protocol version, S session
PROOF: Final = 0xC1  # S mac
GATHER: Final = 0xC3  # S key, i64 rank, i64 world size, S value -> all values, S each
ARRIVE: Final = 0xC4  # S key, i64 rank (-1: unnamed), i64 world size
AWAIT_GET: Final = 0xC7  # S key -> value, once there is one
AWAIT_POP: Final = 0xC8  # S key -> item, once there is one
WATCH: Final = 0xC9  # u64 n, n * S key -> nothing; then events of the same tag
PRESENCE: Final = 0xCA  # S key, S value, i64 milliseconds: a key with a lease of the session
STATISTICS: Final = 0xCB  # -> JSON
BEAT: Final = 0xCC  # renew the session's leases -> i64 how many there are
RELEASE: Final = 0xCD  # S key: end a lease of the session now

# Added to SET or GET by the parser: a run of such commands in one message; never on the wire.
RUN: Final = 0x100

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
NOTHING: Final = 3  # no such key or item
EVENT: Final = 4  # a watched key changed; payload: u8 present, S key, S value

# torch's one-byte answers.
WAIT_DONE: Final = b"\x00"
WAIT_CANCELLED: Final = b"\x01"
CHECK_PRESENT: Final = b"\x00"
CHECK_MISSING: Final = b"\x01"

Message = tuple[object, ...]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_FRAME = struct.Struct("<BIQ")
_HEAD = struct.Struct("<BI")

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
    """Encode a string as its length followed by its bytes."""
    return _U64.pack(len(data)) + data


def pack_strings(strings: Iterable[bytes]) -> bytes:
    """Encode strings one after the other, without a count."""
    pack = _U64.pack
    pieces: list[bytes] = []
    for data in strings:
        pieces += (pack(len(data)), data)
    return b"".join(pieces)


def unpack_strings(data: bytes, position: int = 0) -> list[bytes]:
    """Decode all strings in a payload, from `position` to the end of the payload.

    Raises:
        StoreProtocolError: the payload ends in the middle of a string.
    """
    strings: list[bytes] = []
    while position < len(data):
        if position + 8 > len(data):
            raise StoreProtocolError("the reply ends in the middle of a length field")
        end = position + 8 + _U64.unpack_from(data, position)[0]
        if end > len(data):
            raise StoreProtocolError("the reply ends in the middle of a string")
        strings.append(data[position + 8 : end])
        position = end
    return strings


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Encode i64 values one after the other."""
    return b"".join(map(_I64.pack, numbers))


def unpack_integers(data: bytes) -> list[int]:
    """Decode a payload of i64 values, ignoring an incomplete last value."""
    return [number for (number,) in _I64.iter_unpack(data[: len(data) // 8 * 8])]


def frame(status: int, tag: int, payload: bytes = b"") -> bytes:
    """Encode an answer to one of echelon's queries as a frame."""
    return _FRAME.pack(status, tag, len(payload)) + payload


def frame_header(status: int, tag: int, length: int) -> bytes:
    """Encode only the header of an answer."""
    return _FRAME.pack(status, tag, length)


def unpack_frame_header(data: bytes) -> tuple[int, int, int]:
    """Decode the header of a frame into (status, tag, payload length)."""
    status, tag, length = _FRAME.unpack(data)
    return status, tag, length


def tagged(query: int, tag: int, *fields: bytes | int | list[bytes]) -> bytes:
    """Encode one of echelon's queries; the fields are encoded as in `encode`."""
    return _HEAD.pack(query, tag) + encode(query, *fields)[1:]


def encode(query: int, *fields: bytes | int | list[bytes]) -> bytes:
    """Encode one command: bytes as a string, an int as an i64, a list as a count and its strings.

    In a MULTI_SET, keys and values alternate in the list, and the count is the number of pairs.
    In a PING or VALIDATE, an int is encoded as a u32.
    """
    pieces = [bytes((query,))]
    for field in fields:
        if isinstance(field, bytes):
            pieces.append(pack_string(field))
        elif isinstance(field, int):
            pieces.append(_U32.pack(field) if query in (PING, VALIDATE) else _I64.pack(field))
        else:
            count = len(field) // 2 if query in (MULTI_SET, ACK_MULTI_SET) else len(field)
            pieces += (_U64.pack(count), pack_strings(field))
    return b"".join(pieces)
