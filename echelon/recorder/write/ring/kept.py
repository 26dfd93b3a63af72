"""Preserve pending operations whose slots are about to be reused.

A hung operation in one group must remain recorded while other groups continue. Therefore, the
operation is moved, with its signature, to a separate section of the ring, and stays there until it
ends.
"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import (
    KEPT_OPERATION,
    MAX_SIGNATURE_BYTES,
    NUM_KEPT,
    OPERATION_FIXED,
    OPERATION_SLOT,
    RECENT_BYTES,
    RECENT_HEAD,
    RECENT_UNIT,
    Live,
)

_STAMP_STRUCT = struct.Struct("<Q")
_SIGNATURE_STRUCT = struct.Struct("<II")  # length and CRC32 of a signature
_REF_STRUCT = struct.Struct("<I")
_RECENT_STRUCT = struct.Struct("<IIII")
_SLOT_BYTES = OPERATION_SLOT.itemsize
_STATE_OFFSET = OPERATION_SLOT.fields["state"][1]  # type: ignore[index]
_REF_OFFSET = (
    OPERATION_SLOT.fields["fixed"][1] + OPERATION_FIXED.fields["signature"][1]  # type: ignore[index]
)
_U32 = 0xFFFFFFFF
_RECENT_UNITS = RECENT_BYTES // RECENT_UNIT


class Kept:
    """A ring's section for operations that outlive their slots.

    The caller must hold the writer's lock.
    """

    def __init__(self, memory: Any, live: Any, layout: Layout) -> None:
        self._memory = memory
        self._live = live
        self._offset = layout.kept_offset
        self._slots_offset = layout.operations_offset
        self._recent_offset = layout.recent_offset
        self._stamps = [0] * NUM_KEPT  # of the operation in each place; 0: it is free

    def keep(self, slot: int) -> bool:
        """Copy the operation in `slot` to this section; return False if the section is full."""
        if 0 not in self._stamps:
            return False
        at = self._slots_offset + slot * _SLOT_BYTES
        copy = bytes(self._memory[at : at + _SLOT_BYTES])
        stamp = int(_STAMP_STRUCT.unpack_from(copy)[0])
        place = self._stamps.index(0)
        self._stamps[place] = stamp
        self._live[Live.NUM_KEPT] += 1
        signature = self._signature(_REF_STRUCT.unpack_from(copy, _REF_OFFSET)[0])
        crc = crc32(signature, stamp & _U32)  # another operation's signature never fits this stamp
        copy += _SIGNATURE_STRUCT.pack(len(signature), crc) + signature
        to = self._offset + place * KEPT_OPERATION.itemsize
        self._memory[to : to + len(copy)] = copy
        return True

    def started(self, stamp: int, cell: bytes) -> None:
        """Mark the retained operation that has this stamp as started; ignore unknown stamps."""
        if stamp in self._stamps:
            at = self._at(stamp) + _STATE_OFFSET
            self._memory[at : at + len(cell)] = cell

    def ended(self, stamp: int) -> None:
        """Free the slot of the ended operation that has this stamp; ignore unknown stamps."""
        if stamp in self._stamps:
            _STAMP_STRUCT.pack_into(self._memory, self._at(stamp), 0)
            self._stamps[self._stamps.index(stamp)] = 0
            self._live[Live.NUM_KEPT] -= 1

    def _at(self, stamp: int) -> int:
        return self._offset + self._stamps.index(stamp) * KEPT_OPERATION.itemsize

    def _signature(self, ref: int) -> bytes:
        """Return a signature's bytes from `recent`, or b"" if they have been overwritten."""
        at = self._recent_offset + ref % _RECENT_UNITS * RECENT_UNIT
        position, length, _, _ = _RECENT_STRUCT.unpack_from(self._memory, at)
        if position != ref or length > MAX_SIGNATURE_BYTES:
            return b""
        begin = at + RECENT_HEAD.itemsize
        return bytes(self._memory[begin : begin + length])
