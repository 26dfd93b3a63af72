"""Store a ring's texts: permanent names, and recent texts, which are eventually overwritten.

See schema.py, [Note: two kinds of strings]. Storing a new text takes a lock. A signal handler or
finalizer that interrupts the thread holding the lock does not wait for the lock. It receives a
reference to the placeholder `TABLE_FULL` instead.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any
from zlib import crc32

from echelon.recorder.format.layout import STRINGS_OFFSET
from echelon.recorder.format.schema import (
    IS_RECENT,
    NAMES_BYTES,
    RECENT_BYTES,
    RECENT_UNIT,
    STRINGS_BYTES,
    TABLE_FULL,
    Live,
)

_STRING_STRUCT = struct.Struct("<HI")
_RECENT_STRUCT = struct.Struct("<IIII")
_MAX_STRING_BYTES = 4000
_UNITS = RECENT_BYTES // RECENT_UNIT
# Caches of references into `recent` are emptied each time a part of it is full, so that no new
# record points to an entry that is about to be overwritten.
_PART_UNITS = _UNITS // 4
_MAX_CACHED = 4096
_SPAN_CHARS = 600


class Texts:
    """A thread-safe store of strings in a ring's memory; a string is addressed by a reference."""

    def __init__(self, memory: Any, live: Any, recent_offset: int) -> None:
        self._memory = memory
        self._live = live
        self._recent_offset = recent_offset
        self.names: dict[str, int] = {}  # what is stored already: the C core looks here, too
        self.recents: dict[str, int] = {}
        self._lock = threading.RLock()
        self._is_writing = False
        self._used = 0
        self._position = 1
        self._when_a_part_is_full: list[Callable[[], None]] = [self.recents.clear]
        self._table_full = 0
        self.intern("")
        self._table_full = self.intern(TABLE_FULL)

    def intern(self, text: str, room: int = NAMES_BYTES) -> int:
        """Return a reference to a permanent string, storing the string if it is new.

        Args:
            room: how many bytes of the table can be in use once a string of this kind is stored:
                `NAMES_BYTES`, `SITES_BYTES` or, for groups, `STRINGS_BYTES`.
        """
        known = self.names.get(text)
        if known is not None:
            return known
        data = _cut(text.encode("utf-8", "replace"))
        with self._lock:
            if self._is_writing:
                return self._table_full
            self._is_writing = True
            try:
                return self._add_name(text, data, room)
            finally:
                self._is_writing = False

    def intern_group(self, text: str) -> int:
        """Return a reference to a group's string, stored in `recent` if the table is full."""
        ref = self.intern(text, STRINGS_BYTES)
        return self.recent(text) if ref == self._table_full else ref

    def recent(self, text: str) -> int:
        """Return a reference to a string in `recent`, storing the string if it is not cached."""
        if not text:
            return 0
        known = self.recents.get(text)
        if known is not None:
            return known
        ref = self.append(_cut(text.encode("utf-8", "replace")))
        if ref == 0:
            return self._table_full
        ref |= IS_RECENT
        if len(self.recents) >= _MAX_CACHED:
            self.recents.clear()
        self.recents[text] = ref
        return ref

    def span_name(self, name: object) -> int:
        """Truncate a span's name to a maximum length, and return a reference to it."""
        return self.intern(text_of(name)[:_SPAN_CHARS])

    def span_detail(self, detail: object) -> int:
        """Truncate a span's detail to a maximum length, and return a reference to it."""
        return self.recent(text_of(detail)[:_SPAN_CHARS])

    def append(self, data: bytes) -> int:
        """Append an entry to `recent`; return its position.

        Return 0 if this call interrupts another append on the same thread (in a signal handler).
        """
        with self._lock:
            if self._is_writing:
                return 0
            self._is_writing = True
            try:
                return self._append(data)
            finally:
                self._is_writing = False

    def when_a_part_is_full(self, forget: Callable[[], None]) -> None:
        """Register a function that drops cached references to entries of `recent`.

        The function is called each time another quarter of `recent` has been filled.
        """
        self._when_a_part_is_full.append(forget)

    def _add_name(self, text: str, data: bytes, room: int) -> int:
        known = self.names.get(text)
        if known is not None:
            return known
        start = self._used
        end = start + _STRING_STRUCT.size + len(data)
        if end > room:
            self._live[Live.STRINGS_REFUSED] += 1
            return self._table_full
        at = STRINGS_OFFSET + start
        self._memory[at + _STRING_STRUCT.size : STRINGS_OFFSET + end] = data
        _STRING_STRUCT.pack_into(self._memory, at, len(data), crc32(data))
        self._used = end
        self._live[Live.STRINGS_USED_BYTES] = end
        self.names[text] = start
        return start

    def _append(self, data: bytes) -> int:
        units = -(-(_RECENT_STRUCT.size + len(data)) // RECENT_UNIT)
        before = position = self._position
        if position % _UNITS + units > _UNITS:
            position += _UNITS - position % _UNITS  # no entry runs over the end
        if position % IS_RECENT == 0:
            position += 1
        at = self._recent_offset + position % _UNITS * RECENT_UNIT
        begin = at + _RECENT_STRUCT.size
        ref = position % IS_RECENT
        self._memory[begin : begin + len(data)] = data
        _RECENT_STRUCT.pack_into(self._memory, at, ref, len(data), crc32(data, ref), 0)
        self._position = self._live[Live.RECENT_UNITS] = position + units
        if before // _PART_UNITS != self._position // _PART_UNITS:
            for forget in self._when_a_part_is_full:
                forget()
        return ref


def text_of(value: object) -> str:
    """Return `str(value)`, or a placeholder if the conversion raises an exception."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 -- a broken __str__ must not hide what it stands for
        return "<no text>"


def _cut(data: bytes) -> bytes:
    if len(data) <= _MAX_STRING_BYTES:
        return data
    return data[:_MAX_STRING_BYTES].decode("utf-8", "ignore").encode()
