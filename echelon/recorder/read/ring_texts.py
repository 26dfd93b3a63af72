"""Read the strings stored in a ring: names, entries of `recent`, and groups.

An unreadable string is replaced by a placeholder.
"""

from __future__ import annotations

import struct
from zlib import crc32

from echelon.recorder.format.layout import STRINGS_OFFSET, Layout
from echelon.recorder.format.schema import (
    IS_RECENT,
    MAX_RANKS,
    RECENT_BYTES,
    RECENT_UNIT,
    STRINGS_BYTES,
    Group,
    Live,
    decode_ranks,
)
from echelon.recorder.read.damage import Damage

DAMAGED = "<damaged>"
OVERWRITTEN = "<overwritten>"
_STRING_HEAD = struct.Struct("<HI")
_RECENT_HEAD = struct.Struct("<IIII")
_RECENT_UNITS = RECENT_BYTES // RECENT_UNIT


class RingTexts:
    """A reader of a ring's texts and groups, which collects them in `strings` and `groups`."""

    def __init__(self, data: bytes, layout: Layout, live: tuple[int, ...], damage: Damage) -> None:
        self.strings: list[str] = [""]
        self.groups: list[Group] = []
        self._data = data
        self._layout = layout
        self._damage = damage
        self._string_index: dict[int, int] = {0: 0}
        self._group_index: dict[int, int] = {}
        self._ranks_left = MAX_RANKS
        self._recent_units = live[Live.RECENT_UNITS]
        self._strings_used = min(live[Live.STRINGS_USED_BYTES], STRINGS_BYTES)

    def string(self, ref: int) -> int:
        """Return the index in `strings` of a referenced string, adding the string on first use."""
        known = self._string_index.get(ref)
        if known is not None:
            return known
        self.strings.append(self.text(ref))
        self._string_index[ref] = len(self.strings) - 1
        return len(self.strings) - 1

    def text(self, ref: int) -> str:
        """Return the text that a reference points to, or a placeholder if it cannot be read."""
        if ref & IS_RECENT:
            return self._recent_text(ref - IS_RECENT)
        at = STRINGS_OFFSET + ref
        begin = at + _STRING_HEAD.size
        if ref + _STRING_HEAD.size <= self._strings_used:
            length, crc = _STRING_HEAD.unpack_from(self._data, at)
            data = self._data[begin : begin + length]
            if begin + length - STRINGS_OFFSET <= self._strings_used and crc32(data) == crc:
                return data.decode("utf-8", "replace")
        # Or it is newer than the copy of the texts, which precede the slots.
        self._damage.note_unreadable("a text is damaged")
        return DAMAGED

    def _recent_text(self, ref: int) -> str:
        data = self.recent(ref)
        if data is not None:
            return data.decode("utf-8", "replace")
        if self.is_overwritten(ref):
            return OVERWRITTEN
        self._damage.note_unreadable("a text is damaged")
        return DAMAGED

    def recent(self, ref: int) -> bytes | None:
        """Return an entry of `recent`, or None if it has been overwritten or is damaged."""
        at = self._layout.recent_offset + ref % _RECENT_UNITS * RECENT_UNIT
        position, length, crc, _ = _RECENT_HEAD.unpack_from(self._data, at)
        begin = at + _RECENT_HEAD.size
        if ref == 0 or position != ref or begin + length > self._layout.file_bytes:
            return None
        data = self._data[begin : begin + length]
        return data if crc32(data, ref) == crc else None

    def is_overwritten(self, ref: int) -> bool:
        """Return whether newer entries in `recent` have overwritten the entry at `ref`."""
        return ref != 0 and (self._recent_units - ref) % IS_RECENT > _RECENT_UNITS

    def group(self, ref: int) -> int:
        """Return a group's index in `groups`, adding the group on first use."""
        known = self._group_index.get(ref)
        if known is not None:
            return known
        name, _, ranks = self.text(ref).rpartition("\n")
        try:
            group = Group(name, decode_ranks(ranks, self._ranks_left))
            self._ranks_left -= len(group.ranks)
        except ValueError:
            # The reference distinguishes it from other unreadable groups: they must never be
            # merged.
            group = Group(name or f"{DAMAGED} {ref}", ())
            self._damage.warn("a group's list of members is damaged")
        self.groups.append(group)
        self._group_index[ref] = len(self.groups) - 1
        return len(self.groups) - 1
