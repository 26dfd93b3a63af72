"""Parse a byte stream into messages, incrementally and regardless of packet boundaries.

A message is a parsed command, as a flat tuple: the query byte, then the command's fields in order
(bytes, int, list of bytes). A run of SET or GET commands with equal lengths forms a single message
(see `expand_run`). Every length is checked against `Limits` before anything is stored.

After a violation of the protocol, the parser ignores all further bytes, and `violation` gives the
reason. Messages completed before the violation are still delivered.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Final

from echelon.errors import StoreProtocolError
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_TAG_LENGTH = struct.Struct("<IQ")

# The fields of each query: K key, V value, q i64, I u32, t u32 tag, k list of keys, p list of
# key-value pairs.
_FIELDS: Final[dict[int, str]] = {
    p.SET: "KV",
    p.COMPARE_SET: "KVV",
    p.GET: "K",
    p.ADD: "Kq",
    p.CHECK: "k",
    p.WAIT: "k",
    p.NUM_KEYS: "",
    p.DELETE_KEY: "K",
    p.APPEND: "KV",
    p.MULTI_GET: "k",
    p.MULTI_SET: "p",
    p.CANCEL_WAIT: "",
    p.PING: "I",
    p.QUEUE_PUSH: "KV",
    p.QUEUE_POP: "K",
    p.QUEUE_LEN: "K",
    p.LIST_KEYS: "",
    p.BARRIER: "Kq",
    p.ACK_SET: "tKV",
    p.ACK_COMPARE_SET: "tKVV",
    p.GET_IF: "tK",
    p.ACK_ADD: "tKq",
    p.CHECK_EACH: "tk",
    p.AWAIT: "tk",
    p.ACK_NUM_KEYS: "t",
    p.ACK_DELETE: "tK",
    p.ACK_APPEND: "tKV",
    p.AWAIT_MULTI_GET: "tk",
    p.ACK_MULTI_SET: "tp",
    p.CANCEL: "t",
    p.ACK_PING: "t",
    p.ACK_PUSH: "tKV",
    p.POP_IF: "tK",
    p.ACK_QUEUE_LEN: "tK",
    p.ACK_LIST_KEYS: "t",
    p.HELLO: "tVqV",
    p.PROOF: "tV",
    p.GATHER: "tKqqV",
    p.ARRIVE: "tKqq",
    p.AWAIT_GET: "tK",
    p.AWAIT_POP: "tK",
    p.WATCH: "tk",
    p.PRESENCE: "tKVq",
    p.STATISTICS: "t",
    p.BEAT: "t",
    p.RELEASE: "tK",
}

# Shapes that the fast path knows, by query byte; 0 takes the slow path.
_KEY_VALUE: Final = 1
_KEY: Final = 2
_KEY_INT: Final = 3
_KEYS: Final = 4
_NUMBER: Final = 5
_TAGGED: Final = 6
_FAST: Final = {"KV": _KEY_VALUE, "K": _KEY, "Kq": _KEY_INT, "k": _KEYS, "I": _NUMBER}
_FAST_TAGGED: Final = {"t" + fields: shape for fields, shape in _FAST.items()}
_TAGGED_SHAPES: Final = bytes(_FAST_TAGGED.get(_FIELDS.get(q, ""), 0) for q in range(256))
_TORCH_SHAPES: Final = bytes(_FAST.get(_FIELDS.get(query, ""), 0) for query in range(256))
_OUR_SHAPES: Final = bytes(
    plain or (_TAGGED if tagged else 0)
    for plain, tagged in zip(_TORCH_SHAPES, _TAGGED_SHAPES, strict=True)
)
_NO_SHAPES: Final = bytes(256)

_MIN_RUN: Final = 8  # commands of equal lengths in a row from which on they are cut out together
_MAX_RUN_SHAPES: Final = 256
_MAX_PATTERN_BYTES: Final = 4096  # of key and value together

_OPENING: Final = bytes((p.VALIDATE,)) + _U32.pack(p.VALIDATE_MAGIC)

_Steps = Generator[int, bytes, p.Message | None]


class Parser:
    """An incremental parser that turns a byte stream into messages.

    Until the owner sets `admitted`, only small commands are allowed.

    Attributes:
        violation: the reason for refusing the peer; None if it has followed the protocol.
        extensions: True once the peer has announced itself as an echelon client.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.violation: str | None = None
        self.extensions = False
        self._is_admitted = False
        self._shapes = _NO_SHAPES
        self._held = bytearray()
        self._budget = 0
        self._steps: _Steps | None = None
        self._need = 0
        self._is_fresh = True

    @property
    def is_inside_command(self) -> bool:
        """True if a command or the handshake is incomplete."""
        return self._steps is not None

    def feed(self, data: bytes) -> list[p.Message]:
        """Parse received bytes and return the messages that they complete."""
        out: list[p.Message] = []
        if self.violation is not None:
            return out
        if self._held:
            data = self._after_held(data)
            if not data:
                return out
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

    def finish(self, data: bytes) -> tuple[list[p.Message], bytes]:
        """Parse the rest of the incomplete command.

        Returns:
            (messages, rest): `messages` contains the command's message, or is empty if the command
            is still incomplete or is invalid; `rest` is the bytes that follow the command.
        """
        out: list[p.Message] = []
        if self.violation is not None:
            return out, b""
        if self._held:
            data = self._after_held(data)
        try:
            position = self._advance(data, 0, out)
        except StoreProtocolError as error:
            self.violation = str(error)
            self._steps = None
            return out, b""
        return out, data[position:]

    def _after_held(self, data: bytes) -> bytes:
        """Buffer `data`; return all buffered bytes, or b"" if more bytes are needed."""
        self._held += data
        if len(self._held) < self._need:
            return b""
        data = bytes(self._held)
        self._held.clear()
        return data

    def _scan(self, data: bytes, position: int, out: list[p.Message]) -> None:
        """Extract complete commands, starting at `position`; begin to parse an incomplete one."""
        size = len(data)
        key_bytes, value_bytes = self.limits.key_bytes, self.limits.value_bytes
        shapes, read_u64 = self._shapes, _U64.unpack_from
        while position < size:
            query = data[position]
            shape = shapes[query]
            key_at = position + 9
            if shape == _TAGGED:
                end = self._cut_tagged(data, position, out)
                if end:
                    position = end
                    continue
            elif shape == _NUMBER:
                if position + 5 <= size:
                    (number,) = _U32.unpack_from(data, position + 1)
                    out.append((query, number))
                    self._note_ping(number)
                    shapes = self._shapes
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
            shapes = self._shapes

    def _cut_tagged(self, data: bytes, position: int, out: list[p.Message]) -> int:
        """Extract one tagged command if its form allows the fast path.

        Returns the position after the command, or 0 if the fast path cannot extract the command.
        """
        size, query, key_at = len(data), data[position], position + 13
        if key_at > size:
            return 0
        tag, length = _TAG_LENGTH.unpack_from(data, position + 1)
        assert isinstance(length, int)
        shape = _TAGGED_SHAPES[query]
        if shape == _KEYS:
            if length != 1 or key_at + 8 > size:
                return 0
            length = p.unpack_u64(data[key_at : key_at + 8])
            key_at += 8
        end: int = key_at + length
        if length > self.limits.key_bytes or end > size:
            return 0
        if shape == _KEY:
            out.append((query, tag, data[key_at:end]))
        elif shape == _KEYS:
            out.append((query, tag, [data[key_at:end]]))
        elif end + 8 > size:
            return 0
        elif shape == _KEY_INT:
            out.append((query, tag, data[key_at:end], *_I64.unpack_from(data, end)))
            end += 8
        else:
            length = p.unpack_u64(data[end : end + 8])
            value_at = end + 8
            if length > self.limits.value_bytes or value_at + length > size:
                return 0
            out.append((query, tag, data[key_at:end], data[value_at : value_at + length]))
            end = value_at + length
        return end

    def _open(self, data: bytes, out: list[p.Message]) -> int:
        """Process the first bytes of the connection; return the position of the first command."""
        self._is_fresh = False
        if data.startswith(_OPENING):
            return len(_OPENING)
        self._steps = self._handshake()
        self._need = next(self._steps)
        return self._advance(data, 0, out)

    @property
    def admitted(self) -> bool:
        """True if the server has admitted the peer as a member."""
        return self._is_admitted

    @admitted.setter
    def admitted(self, is_admitted: bool) -> None:
        self._is_admitted = is_admitted
        self._choose_shapes()

    def _choose_shapes(self) -> None:
        """Record which queries from this peer can take the fast path."""
        if self._is_admitted:
            self._shapes = _OUR_SHAPES if self.extensions else _TORCH_SHAPES
        else:
            self._shapes = _NO_SHAPES

    def _first_need(self, out: list[p.Message]) -> int:
        """Start parsing the next command; return the number of bytes that the first step needs."""
        assert self._steps is not None
        try:
            return next(self._steps)
        except StopIteration as done:
            self._complete(done.value, out)
            return 0

    def _advance(self, data: bytes, position: int, out: list[p.Message]) -> int:
        """Resume parsing the incomplete command at `position`; return where parsing stopped."""
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

    def _complete(self, message: p.Message | None, out: list[p.Message]) -> None:
        """Finish the current command, and append its message, if any, to `out`."""
        self._steps = None
        if message is not None:
            out.append(message)

    def _handshake(self) -> _Steps:
        """Require the connection to start with VALIDATE and its magic number."""
        first = (yield 1)[0]
        if first != p.VALIDATE:
            raise StoreProtocolError(
                f"the peer is not a store client: its first byte is 0x{first:02x}, not VALIDATE"
            )
        (magic,) = _U32.unpack((yield 4))
        if magic != p.VALIDATE_MAGIC:
            raise StoreProtocolError(
                f"the peer is not a store client: its VALIDATE has magic number 0x{magic:08x}"
            )
        return None

    def _command(self, query: int) -> _Steps:
        """Read the fields of one command and return its message."""
        fields = _FIELDS.get(query)
        if fields is None or (query >= p.TAGGED and not self.extensions):
            raise StoreProtocolError(f"unknown query 0x{query:02x}")
        self._budget = self.limits.command_bytes if self.admitted else self.limits.untrusted_bytes
        message: list[object] = [query]
        for kind in fields:
            if kind == "q":
                message.append(_I64.unpack((yield 8))[0])
            elif kind == "I" or kind == "t":
                message.append(_U32.unpack((yield 4))[0])
            elif kind == "K" or kind == "V":
                (length,) = _U64.unpack((yield 8))
                message.append((yield self._allowed(query, kind, length)))
            else:
                (count,) = _U64.unpack((yield 8))
                if count > self.limits.num_command_keys:
                    raise StoreProtocolError(
                        f"{p.NAMES[query]} has {count} keys, but the limit is "
                        f"{self.limits.num_command_keys}"
                    )
                strings: list[bytes] = []
                for index in range(count if kind == "k" else 2 * count):
                    (length,) = _U64.unpack((yield 8))
                    of_key = kind == "k" or index % 2 == 0
                    strings.append((yield self._allowed(query, "K" if of_key else "V", length)))
                message.append(strings)
        if query == p.PING:
            self._note_ping(message[1])
        return tuple(message)

    def _note_ping(self, nonce: object) -> None:
        """Accept echelon's own queries from now on if the PING comes from an echelon client."""
        if nonce == p.OUR_NONCE:
            self.extensions = True
            self._choose_shapes()

    def _allowed(self, query: int, kind: str, length: int) -> int:
        """Return `length` after checking that the command can contain a string of this length."""
        limit = self.limits.key_bytes if kind == "K" else self.limits.value_bytes
        if length > limit:
            what = "key" if kind == "K" else "value"
            raise StoreProtocolError(
                f"{p.NAMES[query]}: the {what} has {length} bytes, but the limit is {limit}"
            )
        self._budget -= length + 8
        if self._budget < 0:
            raise StoreProtocolError(f"{p.NAMES[query]}: the command is larger than the limit")
        return length


@dataclass(frozen=True, slots=True)
class _RunShape:
    """The byte format of a run of commands with the same query, key length and value length."""

    pattern: re.Pattern[bytes] | None
    layout: struct.Struct


_run_shapes: dict[tuple[int, int, int], _RunShape] = {}


def _run_shape(query: int, key_bytes: int, value_bytes: int) -> _RunShape:
    """Return the format of a run of equal-length commands.

    `value_bytes` is -1 if the commands have no values.
    """
    shape = _run_shapes.get((query, key_bytes, value_bytes))
    if shape is None:
        tail = "" if value_bytes < 0 else f"8x{value_bytes}s"
        pattern = None
        if len(_run_shapes) < _MAX_RUN_SHAPES and 0 < key_bytes + value_bytes < _MAX_PATTERN_BYTES:
            header = re.escape(bytes((query,)) + _U64.pack(key_bytes))
            record = header + b".{%d}" % key_bytes
            if value_bytes >= 0:
                record += re.escape(_U64.pack(value_bytes)) + b".{%d}" % value_bytes
            pattern = re.compile(b"(?s:(?:%s)+)" % record)
        shape = _RunShape(pattern, struct.Struct(f"<9x{key_bytes}s{tail}"))
        if len(_run_shapes) < _MAX_RUN_SHAPES:
            _run_shapes[query, key_bytes, value_bytes] = shape
    return shape


def _cut_run(data: bytes, position: int, record: int, key_end: int, out: list[p.Message]) -> int:
    """Extract a run of commands of equal length, and return the position after the run.

    The first command is at `position`; each command is `record` bytes long. `key_end` is -1 if the
    commands have no values.
    """
    query = data[position]
    key_bytes = record - 9 if key_end < 0 else key_end - position - 9
    value_bytes = -1 if key_end < 0 else record - key_bytes - 17
    shape = _run_shape(query, key_bytes, value_bytes)
    if shape.pattern is not None:
        found = shape.pattern.match(data, position)
        assert found is not None
        stop = found.end()
    else:
        stop = _end_of_run(data, position, record, key_end)
    view = memoryview(data)[position:stop]
    if query == p.SET or query == p.GET:
        out.append((p.RUN | query, shape.layout, view))
    else:
        out += [(query, *fields) for fields in shape.layout.iter_unpack(view)]
    return stop


def _end_of_run(data: bytes, position: int, record: int, key_end: int) -> int:
    """Return the end of the run: the position of the first command with a different header."""
    count = (len(data) - position) // record
    headers: Iterable[int] = range(position, position + 9)
    if key_end >= 0:
        headers = (*headers, *range(key_end, key_end + 8))
    for at in headers:
        column = data[at : position + count * record : record]
        count = min(count, len(column) - len(column.lstrip(column[:1])))
    return position + count * record


def expand_run(message: p.Message) -> list[p.Message]:
    """Split a message that holds a run of SET or GET commands into one message per command."""
    query, layout, view = message
    assert isinstance(query, int)
    assert isinstance(layout, struct.Struct)
    assert isinstance(view, memoryview)
    return [(query - p.RUN, *fields) for fields in layout.iter_unpack(view)]
