"""The ring: one mmap'ed file of fixed size that outlives the process writing it.

The file belongs to the node, not to the process: what was stored before a SIGKILL, an OOM kill or a
segfault is still there, and the agent reads it while the rank hangs inside C code. That is why the
record is no Python list and no socket.

The writer takes no locks on the hot path: slots are handed out by a counter, one thread fills a
slot, and readers check what they see (schema.py, [Note: what makes a slot readable]). Only a new
string, met once per call site, takes a lock. Nothing here decides what is recorded; `recorder.py`
does.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from array import array
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from echelon.recorder.layout import (
    IDENTITY_BYTES,
    IDENTITY_OFFSETS,
    LAST_WORDS_BYTES,
    LAST_WORDS_OFFSET,
    LIVE_BYTES,
    LIVE_OFFSET,
    OPEN_SPANS_OFFSET,
    STRINGS_OFFSET,
    Layout,
)
from echelon.recorder.schema import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    OPERATION_SLOT,
    PAGE_BYTES,
    RING_MAGIC,
    SPAN_SLOT,
    STRINGS_BYTES,
    TABLE_FULL,
    Identity,
    LastWords,
    Live,
    State,
)

OPERATION_FIXED_STRUCT = struct.Struct("<QqqqqqqIIIIIIiiiiIHH")
SPAN_FIXED_STRUCT = struct.Struct("<QqqqIIIIII")
_HEADER_STRUCT = struct.Struct("<8sHHIIIIII")  # and its CRC32
_HEAD_STRUCT = struct.Struct("<QII")
_STAMP_STRUCT = struct.Struct("<Q")
_STATE_BODY_STRUCT = struct.Struct("<qqII")
_STATE_STRUCT = struct.Struct("<QqqIIIIQ")
_SPAN_STRUCT = struct.Struct(f"<QII{SPAN_FIXED_STRUCT.size}sQ")
_STRING_STRUCT = struct.Struct("<HI")
_CRC_STRUCT = struct.Struct("<I")

_SLOT_BYTES = OPERATION_SLOT.itemsize
_TAIL_STAMP_OFFSET = OPERATION_SLOT.fields["tail"][1]  # type: ignore[index]
_STATE_OFFSET = OPERATION_SLOT.fields["state"][1]  # type: ignore[index]
_STARTED = int(State.STARTED)
_pack_stamp = _STAMP_STRUCT.pack_into
_pack_state = _STATE_STRUCT.pack_into
_pack_state_body = _STATE_BODY_STRUCT.pack
_MAX_STRING_BYTES = 4000
_U32 = 0xFFFFFFFF


class Ring:
    """Write one rank's ring file; `close()` unmaps it and leaves the file in place.

    Raises:
        OSError: the file exists already, or the file system cannot hold it.
    """

    def __init__(
        self, path: Path, identity: Identity, *, num_operations: int, num_spans: int
    ) -> None:
        self.path = path
        self.identity = identity
        self.num_operations = num_operations
        self.num_spans = num_spans
        layout = Layout(num_operations, num_spans)
        self._operations_offset = layout.operations_offset
        self._states_offset = layout.operations_offset + _STATE_OFFSET
        self._spans_offset = layout.spans_offset
        self._map = _create(path, layout.file_bytes)
        self._view = memoryview(self._map)
        # Native 8-byte items: each store is one aligned move, so readers never see half a word.
        self.live = self._view[LIVE_OFFSET : LIVE_OFFSET + LIVE_BYTES].cast("Q")
        self._stamps = array("Q", bytes(8 * num_operations))  # who owns each slot now
        self._started = array("q", bytes(8 * num_operations))
        self._packers: dict[int, Callable[..., None]] = {}  # of head and payload, by its size
        self._strings: dict[str, int] = {}
        self._strings_lock = threading.Lock()
        self._strings_owner = 0
        self._strings_used = 0
        self._table_full = 0
        self._num_blobs = 0
        self._num_identities = 0
        self.intern("")
        self._table_full = self.intern(TABLE_FULL)
        self.write_identity(identity)
        header = _HEADER_STRUCT.pack(
            RING_MAGIC,
            FORMAT_MAJOR,
            FORMAT_MINOR,
            PAGE_BYTES,
            num_operations,
            num_spans,
            _SLOT_BYTES,
            SPAN_SLOT.itemsize,
            STRINGS_BYTES,
        )
        header += _CRC_STRUCT.pack(crc32(header))
        # Last, the magic: until then no reader takes this for a ring.
        self._map[len(RING_MAGIC) : len(header)] = header[len(RING_MAGIC) :]
        self._map[: len(RING_MAGIC)] = RING_MAGIC

    def intern(self, text: str) -> int:
        """Return the reference of a string, storing it if it is new. Thread-safe."""
        known = self._strings.get(text)
        if known is not None:
            return known
        data = _cut(text.encode("utf-8", "replace"))
        if self._strings_owner == threading.get_ident():
            return self._table_full  # a finalizer or signal handler came in between: no deadlock
        with self._strings_lock:
            self._strings_owner = threading.get_ident()
            try:
                return self._add_string(text, data)
            finally:
                self._strings_owner = 0

    def _add_string(self, text: str, data: bytes) -> int:
        known = self._strings.get(text)
        if known is not None:
            return known
        start = self._strings_used
        end = start + _STRING_STRUCT.size + len(data)
        if end > STRINGS_BYTES:
            self.live[Live.STRINGS_REFUSED] += 1
            return self._table_full
        at = STRINGS_OFFSET + start
        self._map[at + _STRING_STRUCT.size : STRINGS_OFFSET + end] = data
        _STRING_STRUCT.pack_into(self._map, at, len(data), crc32(data))
        self._strings_used = end
        self.live[Live.STRINGS_USED_BYTES] = end
        self._strings[text] = start
        return start

    def write_identity(self, identity: Identity) -> None:
        """Replace the identity."""
        self.identity = identity
        place = IDENTITY_OFFSETS[self._num_identities % 2]
        self._num_identities += 1
        self._write_blob(place, IDENTITY_BYTES, asdict(identity))

    def write_last_words(self, words: LastWords) -> None:
        """Store the exception that ends this rank; texts are cut to what fits."""
        self._write_blob(LAST_WORDS_OFFSET, LAST_WORDS_BYTES, asdict(words))

    def write_operation(self, record: int, payload: bytes) -> None:
        """Fill the slot of operation number `record`.

        Its state cell keeps the stamp of the slot's last use: that reads as CREATED.
        """
        slot = record % self.num_operations
        at = self._operations_offset + slot * _SLOT_BYTES
        stamp = record + 1
        size = len(payload)
        pack = self._packers.get(size)
        if pack is None:
            pack = self._packers[size] = struct.Struct(f"<QII{size}s").pack_into
        pack(self._map, at, stamp, size, crc32(payload), payload)
        _pack_stamp(self._map, at + _TAIL_STAMP_OFFSET, stamp)
        self._stamps[slot] = stamp
        self._started[slot] = 0

    def mark_started(self, record: int, now_ns: int) -> None:
        """Note that the backend has taken the operation up. Too late (slot reused) is ignored."""
        slot = record % self.num_operations
        stamp = record + 1
        if self._stamps[slot] != stamp:
            return
        self._started[slot] = now_ns
        crc = crc32(_pack_state_body(now_ns, 0, 0, _STARTED), stamp & _U32)
        at = self._states_offset + slot * _SLOT_BYTES
        _pack_state(self._map, at, stamp, now_ns, 0, 0, _STARTED, crc, 0, stamp)

    def mark_ended(self, record: int, now_ns: int, state: int, error: int = 0) -> None:
        """Note that the operation completed or failed. Too late (slot reused) is ignored."""
        slot = record % self.num_operations
        stamp = record + 1
        if self._stamps[slot] != stamp:
            return
        started = self._started[slot]
        crc = crc32(_pack_state_body(started, now_ns, error, state), stamp & _U32)
        at = self._states_offset + slot * _SLOT_BYTES
        _pack_state(self._map, at, stamp, started, now_ns, error, state, crc, 0, stamp)

    def write_span(self, number: int, fields: bytes) -> None:
        """Store an ended span as number `number` of the ring of spans."""
        at = self._spans_offset + (number % self.num_spans) * SPAN_SLOT.itemsize
        self._write_span_slot(at, number + 1, fields)

    def write_open_span(self, index: int, number: int, fields: bytes) -> None:
        """Store a span that is open (or, with its end stamp, no longer) in place `index`."""
        self._write_span_slot(OPEN_SPANS_OFFSET + index * SPAN_SLOT.itemsize, number + 1, fields)

    def close(self) -> None:
        """Unmap the file. Safe to call twice."""
        if self._map.closed:
            return
        self.live.release()
        self._view.release()
        self._map.close()

    def _write_span_slot(self, at: int, stamp: int, fields: bytes) -> None:
        _SPAN_STRUCT.pack_into(self._map, at, stamp, len(fields), crc32(fields), fields, stamp)

    def _write_blob(self, at: int, room: int, value: dict[str, Any]) -> None:
        data = _fitted(value, room - _HEAD_STRUCT.size - _STAMP_STRUCT.size)
        stamp = self._num_blobs = self._num_blobs + 1
        _HEAD_STRUCT.pack_into(self._map, at, stamp, len(data), crc32(data))
        begin = at + _HEAD_STRUCT.size
        self._map[begin : begin + len(data)] = data
        _STAMP_STRUCT.pack_into(self._map, at + room - _STAMP_STRUCT.size, stamp)


def _cut(data: bytes) -> bytes:
    if len(data) <= _MAX_STRING_BYTES:
        return data
    return data[:_MAX_STRING_BYTES].decode("utf-8", "ignore").encode()


def _fitted(value: dict[str, Any], room: int) -> bytes:
    """Encode a blob, halving its longest part until it fits; the end of a traceback counts."""
    texts = {name: _encoded(part) for name, part in value.items()}
    while sum(len(name) + len(text) + 4 for name, text in texts.items()) + 2 > room:
        longest = max(texts, key=lambda name: len(texts[name]))
        part = value[longest]
        if isinstance(part, str):
            half = len(part) // 2
            value[longest] = part[-half:] if longest == "traceback" else part[:half]
        else:
            value[longest] = type(part)()
        texts[longest] = _encoded(value[longest])
    return _encoded(value)


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    """Make the file with its blocks reserved: a sparse mapping on a full disk dies of SIGBUS."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
