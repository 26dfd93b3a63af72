"""Write the ring: a memory-mapped file of fixed size that outlives its process.

Data stored before a SIGKILL, an OOM kill or a segfault is preserved. The agent can read the file
while the rank hangs inside C code.

This module creates the file and writes its header, identity and last words. Operations, spans and
strings are written by other modules or by the C core. `recorder.py` decides what is recorded.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from echelon.recorder.format.layout import (
    IDENTITY_BYTES,
    IDENTITY_OFFSETS,
    LAST_WORDS_BYTES,
    LAST_WORDS_OFFSET,
    LIVE_BYTES,
    LIVE_OFFSET,
    OPEN_SPANS_OFFSET,
    Layout,
)
from echelon.recorder.format.schema import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    OPERATION_SLOT,
    PAGE_BYTES,
    RING_MAGIC,
    SPAN_SLOT,
    STRINGS_BYTES,
    Identity,
    LastWords,
)
from echelon.recorder.protection import protect, release
from echelon.recorder.write.ring.kept import Kept
from echelon.recorder.write.ring.texts import Texts

SPAN_FIXED_STRUCT = struct.Struct("<QqqqIIIIII")
_HEADER_STRUCT = struct.Struct("<8sHHIIIIII")  # and its CRC32
_HEAD_STRUCT = struct.Struct("<QII")
_STAMP_STRUCT = struct.Struct("<Q")
_SPAN_STRUCT = struct.Struct(f"<QII{SPAN_FIXED_STRUCT.size}sQ")
_CRC_STRUCT = struct.Struct("<I")
_MADV_POPULATE_WRITE = 23


class Ring:
    """A writer of one rank's ring file. `close()` unmaps the file but does not delete it.

    Raises:
        OSError: the file already exists, or the file system is full.
    """

    def __init__(
        self, path: Path, identity: Identity, *, num_operations: int, num_spans: int
    ) -> None:
        self.path = path
        self.identity = identity
        self.num_operations = num_operations
        self.num_spans = num_spans
        self.layout = layout = Layout(num_operations, num_spans)
        self._spans_offset = layout.spans_offset
        self.map = _create(path, layout.file_bytes)
        self._view = memoryview(self.map)
        # Native 8-byte items: each store is one aligned move, so readers never see half a word.
        self.live = self._view[LIVE_OFFSET : LIVE_OFFSET + LIVE_BYTES].cast("Q")
        self.step = -1  # same as `live`, for writers: an attribute is faster to read
        self.texts = Texts(self.map, self.live, layout.recent_offset)
        self.kept = Kept(self.map, self.live, layout)
        protected = protect(self.map)
        self._when_closed: list[Callable[[], None]] = [lambda: release(protected)]
        self._num_blobs = 0
        self._num_identities = 0
        self.write_identity(identity)
        header = _HEADER_STRUCT.pack(
            RING_MAGIC,
            FORMAT_MAJOR,
            FORMAT_MINOR,
            PAGE_BYTES,
            num_operations,
            num_spans,
            OPERATION_SLOT.itemsize,
            SPAN_SLOT.itemsize,
            STRINGS_BYTES,
        )
        header += _CRC_STRUCT.pack(crc32(header))
        # The magic comes last: until then, no reader takes this for a ring.
        self.map[len(RING_MAGIC) : len(header)] = header[len(RING_MAGIC) :]
        self.map[: len(RING_MAGIC)] = RING_MAGIC

    def write_identity(self, identity: Identity) -> None:
        """Replace the identity stored in the ring."""
        self.identity = identity
        place = IDENTITY_OFFSETS[self._num_identities % 2]
        self._num_identities += 1
        self._write_blob(place, IDENTITY_BYTES, asdict(identity))

    def write_last_words(self, words: LastWords) -> None:
        """Store the exception that ends this rank, truncated if necessary."""
        self._write_blob(LAST_WORDS_OFFSET, LAST_WORDS_BYTES, asdict(words))

    def write_span(self, number: int, fields: bytes) -> None:
        """Store a completed span in the slot for its number."""
        at = self._spans_offset + (number % self.num_spans) * SPAN_SLOT.itemsize
        self._write_span_slot(at, number + 1, fields)

    def write_open_span(self, index: int, number: int, fields: bytes) -> None:
        """Store an open span in slot `index`, or mark it as ended if `fields` has an end stamp."""
        self._write_span_slot(OPEN_SPANS_OFFSET + index * SPAN_SLOT.itemsize, number + 1, fields)

    def when_closed(self, release: Callable[[], None]) -> None:
        """Register a function to call before the file is unmapped."""
        self._when_closed.append(release)

    def close(self) -> None:
        """Unmap the file without deleting it. Repeated calls are safe."""
        if self.map.closed:
            return
        for undo in self._when_closed:
            undo()
        self.live.release()
        self._view.release()
        self.map.close()

    def _write_span_slot(self, at: int, stamp: int, fields: bytes) -> None:
        _SPAN_STRUCT.pack_into(self.map, at, stamp, len(fields), crc32(fields), fields, stamp)

    def _write_blob(self, at: int, room: int, value: dict[str, Any]) -> None:
        data = _fitted(value, room - _HEAD_STRUCT.size - _STAMP_STRUCT.size)
        stamp = self._num_blobs = self._num_blobs + 1
        _HEAD_STRUCT.pack_into(self.map, at, stamp, len(data), crc32(data))
        begin = at + _HEAD_STRUCT.size
        self.map[begin : begin + len(data)] = data
        _STAMP_STRUCT.pack_into(self.map, at + room - _STAMP_STRUCT.size, stamp)


def _fitted(value: dict[str, Any], room: int) -> bytes:
    """Encode a blob as JSON, shortening its longest fields until it fits into `room` bytes."""
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
    """Create a new file, reserve its disk blocks, and map it into memory."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError, AttributeError):  # Linux 5.14
            memory.madvise(_MADV_POPULATE_WRITE)  # a page fault costs more than ten operations
        return memory
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
