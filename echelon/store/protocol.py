"""The store's wire protocol: bytes to messages and back, with no I/O.

A connection is a raw stream of commands with no framing, no ids and no error replies, because it
is the protocol that PyTorch's TCPStore speaks; integers are little-endian, a string is a u64 length
and its bytes. Queries from 0x40 on are ours and are understood only after the client has sent PING
with `OUR_NONCE`, which our server answers with the complement and torch's server with an echo.

A message is a flat tuple: the query byte, then its fields in order (bytes, int, or a list of
bytes). `Parser` is incremental: each byte is looked at a constant number of times however the
stream is split, and every length is held against `Limits` before anything is kept.

What the parser refuses it refuses for good: `violation` says why in one line, messages completed
before it are still delivered, and whatever follows is dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
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
EXTENSION_VERSION: Final = 1

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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one peer may ask of a server before it is turned away.

    Attributes:
        key_bytes: longest key, with its leading "/" and every prefix (torch's limit).
        value_bytes: longest value (torch's limit).
        num_command_keys: most keys in one command (torch's limit).
        command_bytes: most bytes in one command, all its strings together.
        untrusted_bytes: most bytes in one command before the peer is admitted.
        num_keys: most keys and queues that a server holds.
        num_connections: most connections; one more is closed at once.
        num_waiters: most things that one connection may wait for at a time.
        unread_bytes: replies that may lie unread before the server stops reading from that
            connection; one reply may be added on top.
        reply_bytes: longest single reply.
        handshake_s: time in which a connection must have become a member.
        command_s: time in which a command must be complete once begun, plus `command_s` for
            every 64 KiB of it that came.
    """

    key_bytes: int = 8192
    value_bytes: int = 8 << 20
    num_command_keys: int = 131072
    command_bytes: int = 256 << 20
    untrusted_bytes: int = 4096
    num_keys: int = 4_000_000
    num_connections: int = 16384
    num_waiters: int = 1024
    unread_bytes: int = 1 << 20
    reply_bytes: int = 256 << 20
    handshake_s: float = 15.0
    command_s: float = 30.0


# The fields of each query: K key, V value, q i64, I u32, k list of keys, p list of key-value pairs.
_FIELDS: Final[dict[int, str]] = {
    SET: "KV",
    COMPARE_SET: "KVV",
    GET: "K",
    ADD: "Kq",
    CHECK: "k",
    WAIT: "k",
    NUM_KEYS: "",
    DELETE_KEY: "K",
    APPEND: "KV",
    MULTI_GET: "k",
    MULTI_SET: "p",
    CANCEL_WAIT: "",
    PING: "I",
    QUEUE_PUSH: "KV",
    QUEUE_POP: "K",
    QUEUE_LEN: "K",
    LIST_KEYS: "",
    BARRIER: "Kq",
    HELLO: "Vq",
    PROOF: "V",
    CANCEL: "",
    GATHER: "KqqV",
    ARRIVE: "Kqq",
    ACK_SET: "KV",
    ACK_ADD: "Kq",
    AWAIT_GET: "K",
    AWAIT_POP: "K",
    WATCH: "k",
    PRESENCE: "KV",
    STATISTICS: "",
}

# Shapes that the fast path knows, by query byte; 0 takes the slow path.
_KEY_VALUE: Final = 1
_KEY: Final = 2
_KEY_INT: Final = 3
_KEYS: Final = 4
_NUMBER: Final = 5
_FAST: Final = {"KV": _KEY_VALUE, "K": _KEY, "Kq": _KEY_INT, "k": _KEYS, "I": _NUMBER}
_OUR_SHAPES: Final = bytes(_FAST.get(_FIELDS.get(query, ""), 0) for query in range(256))
_TORCH_SHAPES: Final = _OUR_SHAPES[:HELLO] + bytes(256 - HELLO)
_NO_SHAPES: Final = bytes(256)

_MIN_RUN: Final = 8  # commands of equal lengths in a row from which on they are cut out together
_MAX_RUN_STRUCTS: Final = 256

_OPENING: Final = bytes((VALIDATE,)) + _U32.pack(VALIDATE_MAGIC)

_Steps = Generator[int, bytes, Message | None]


class Parser:
    """Cut a stream of bytes into messages.

    Complete commands of the common shapes are cut out of the received bytes directly; everything
    else (rare commands, and a command that the packet cuts in two) runs through a generator that
    asks for so many bytes at a time, so that no byte is parsed twice.

    Attributes:
        violation: why the peer must be turned away, None while it behaves.
        admitted: set by the owner once the peer is a member; until then commands are small.
        extensions: whether the peer has announced itself as ours.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.violation: str | None = None
        self.admitted = False
        self.extensions = False
        self._held = bytearray()
        self._budget = 0
        self._steps: _Steps | None = None
        self._need = 0
        self._is_fresh = True

    @property
    def is_inside_command(self) -> bool:
        """Whether a command, or the handshake, was begun and is not complete."""
        return self._steps is not None

    def feed(self, data: bytes) -> list[Message]:
        """Take received bytes and return the messages that they complete."""
        out: list[Message] = []
        if self.violation is not None:
            return out
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return out
            data = bytes(self._held)
            self._held.clear()
        try:
            if self._is_fresh:
                position = self._open(data, out)
            else:
                position = 0 if self._steps is None else self._advance(data, 0, out)
            self._scan(data, position, out)
        except StoreProtocolError as error:
            self.violation = str(error)
            self._steps = None
        return out

    def _scan(self, data: bytes, position: int, out: list[Message]) -> None:
        """Cut out whole commands from `position` on; begin the first that is not whole."""
        size = len(data)
        key_bytes, value_bytes = self.limits.key_bytes, self.limits.value_bytes
        shapes, read_u64 = self._shapes(), _U64.unpack_from
        while position < size:
            query = data[position]
            shape = shapes[query]
            key_at = position + 9
            if shape == _NUMBER:
                if position + 5 <= size:
                    (number,) = _U32.unpack_from(data, position + 1)
                    out.append((query, number))
                    self._note_ping(number)
                    shapes = self._shapes()
                    position += 5
                    continue
            elif shape and key_at <= size:
                (length,) = read_u64(data, position + 1)
                key_end = key_at + length
                if shape == _KEY_VALUE:
                    if length <= key_bytes and key_end + 8 <= size:
                        (length,) = read_u64(data, key_end)
                        end = key_end + 8 + length
                        if end <= size and length <= value_bytes:
                            record = end - position
                            if size - end >= (_MIN_RUN - 1) * record:
                                end = _cut_run(data, position, record, key_end, out)
                            else:
                                out.append((query, data[key_at:key_end], data[key_end + 8 : end]))
                            position = end
                            continue
                elif shape == _KEY:
                    if length <= key_bytes and key_end <= size:
                        record = key_end - position
                        if size - key_end >= (_MIN_RUN - 1) * record:
                            position = _cut_run(data, position, record, -1, out)
                        else:
                            out.append((query, data[key_at:key_end]))
                            position = key_end
                        continue
                elif shape == _KEY_INT:
                    if length <= key_bytes and key_end + 8 <= size:
                        (number,) = _I64.unpack_from(data, key_end)
                        out.append((query, data[key_at:key_end], number))
                        position = key_end + 8
                        continue
                elif length == 1 and key_at + 8 <= size:
                    (length,) = read_u64(data, key_at)
                    key_end = key_at + 8 + length
                    if key_end <= size and length <= key_bytes:
                        out.append((query, [data[key_at + 8 : key_end]]))
                        position = key_end
                        continue
            self._steps = self._command(query)
            self._need = self._first_need(out)
            position = self._advance(data, position + 1, out)
            shapes = self._shapes()

    def _open(self, data: bytes, out: list[Message]) -> int:
        """Take the first bytes of the connection; return where the first command begins."""
        self._is_fresh = False
        if data.startswith(_OPENING):
            return len(_OPENING)
        self._steps = self._handshake()
        self._need = next(self._steps)
        return self._advance(data, 0, out)

    def _shapes(self) -> bytes:
        """Return which queries of this peer may take the fast path."""
        if not self.admitted:
            return _NO_SHAPES
        return _OUR_SHAPES if self.extensions else _TORCH_SHAPES

    def _first_need(self, out: list[Message]) -> int:
        """Start the open command; a command without fields is complete at once."""
        assert self._steps is not None
        try:
            return next(self._steps)
        except StopIteration as done:
            self._complete(done.value, out)
            return 0

    def _advance(self, data: bytes, position: int, out: list[Message]) -> int:
        """Feed the open command from `position`; return where it ended, or the end of data."""
        while self._steps is not None:
            end = position + self._need
            if end > len(data):
                self._held += data[position:]
                return len(data)
            try:
                self._need = self._steps.send(data[position:end])
            except StopIteration as done:
                self._complete(done.value, out)
            position = end
        return position

    def _complete(self, message: Message | None, out: list[Message]) -> None:
        """Close the open command; the handshake yields no message."""
        self._steps = None
        if message is not None:
            out.append(message)

    def _handshake(self) -> _Steps:
        """Demand VALIDATE and its magic number before anything else."""
        first = (yield 1)[0]
        if first != VALIDATE:
            raise StoreProtocolError(
                f"first byte 0x{first:02x}, expected VALIDATE: no store client"
            )
        (magic,) = _U32.unpack((yield 4))
        if magic != VALIDATE_MAGIC:
            raise StoreProtocolError(f"VALIDATE with magic 0x{magic:08x}: no store client")
        return None

    def _command(self, query: int) -> _Steps:
        """Ask for the fields of one command, byte counts first; return the message."""
        fields = _FIELDS.get(query)
        if fields is None or (query >= HELLO and not self.extensions):
            raise StoreProtocolError(f"unknown query 0x{query:02x}")
        self._budget = self.limits.command_bytes if self.admitted else self.limits.untrusted_bytes
        message: list[object] = [query]
        for kind in fields:
            if kind == "q":
                message.append(_I64.unpack((yield 8))[0])
            elif kind == "I":
                message.append(_U32.unpack((yield 4))[0])
            elif kind == "K" or kind == "V":
                (length,) = _U64.unpack((yield 8))
                message.append((yield self._allowed(query, kind, length)))
            else:
                (count,) = _U64.unpack((yield 8))
                if count > self.limits.num_command_keys:
                    raise StoreProtocolError(
                        f"{NAMES[query]} of {count} keys, limit {self.limits.num_command_keys}"
                    )
                strings: list[bytes] = []
                for index in range(count if kind == "k" else 2 * count):
                    (length,) = _U64.unpack((yield 8))
                    of_key = kind == "k" or index % 2 == 0
                    strings.append((yield self._allowed(query, "K" if of_key else "V", length)))
                message.append(strings)
        if query == PING:
            self._note_ping(message[1])
        return tuple(message)

    def _note_ping(self, nonce: object) -> None:
        """Understand our queries from here on if the peer announces itself as ours."""
        if nonce == OUR_NONCE:
            self.extensions = True

    def _allowed(self, query: int, kind: str, length: int) -> int:
        """Return `length` if a string of it may still come in this command."""
        limit = self.limits.key_bytes if kind == "K" else self.limits.value_bytes
        if length > limit:
            what = "key" if kind == "K" else "value"
            raise StoreProtocolError(f"{NAMES[query]}: {what} of {length} bytes, limit {limit}")
        self._budget -= length + 8
        if self._budget < 0:
            raise StoreProtocolError(f"{NAMES[query]}: command too long for one peer")
        return length


_run_structs: dict[tuple[int, int], struct.Struct] = {}


def _cut_run(data: bytes, position: int, record: int, key_end: int, out: list[Message]) -> int:
    """Cut out a run of key-value (or, `key_end` -1, key) commands of equal lengths.

    The command at `position` is `record` bytes long; returns where the run ends. As long as the
    bytes that hold query and lengths repeat every `record` bytes, so do whole commands: one unpack
    cuts them all out.
    """
    count = (len(data) - position) // record
    stop = position + count * record
    headers: Iterable[int] = range(position, position + 9)
    if key_end >= 0:
        headers = (*headers, *range(key_end, key_end + 8))
    for at in headers:
        column = data[at:stop:record]
        same = count - len(column.lstrip(column[:1]))
        if same < count:
            count = same
            stop = position + count * record
    lengths = (key_end, record) if key_end < 0 else (key_end - position - 9, record)
    layout = _run_structs.get(lengths)
    if layout is None:
        if len(_run_structs) >= _MAX_RUN_STRUCTS:
            _run_structs.clear()
        key_bytes = lengths[0]
        form = f"{record - 9}s" if key_end < 0 else f"{key_bytes}s8x{record - key_bytes - 17}s"
        layout = _run_structs[lengths] = struct.Struct(f"<B8x{form}")
    out += layout.iter_unpack(memoryview(data)[position:stop])
    return stop


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
