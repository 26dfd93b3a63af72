"""Cache the fields of an operation that rarely change at a given call site.

A line of code usually passes the same arguments each time. For each line, the cache contains the
callers' positions, the arguments and the packed fields. `Operations` reuses the packed fields if
nothing has changed, and otherwise calls this module.
"""

from __future__ import annotations

import struct
from types import CodeType, FrameType
from typing import Any

from echelon.recorder.write.operations.numbers import pack_clamped
from echelon.recorder.write.operations.signatures import MAX_CALLS, Signatures
from echelon.recorder.write.ring.ring import Ring
from echelon.recorder.write.sites import Sites, user_frame

MAX_TIMEOUT_S = 1e9
TAIL_STRUCT = struct.Struct("<qqIIIIiiiiII")

_SIGNATURE_FIELDS = 7  # of a call: those that come first
_MAX_LINES = 1 << 14
_MAX_TAILS = 256  # of a line

_Code = CodeType | None
_Tails = dict[tuple[Any, ...], bytes]
# Its code; the positions of its three nearest callers; the arguments; the packed fields; and the
# fields of other arguments that it passed from the same callers.
Line = tuple[CodeType, _Code, int, _Code, int, _Code, int, tuple[Any, ...], bytes, _Tails]


class Calls:
    """The packed fields cached for each line of code, and the signature cached for each call.

    A call is a tuple (operation, dtype, reduce_op, timeout_s, shapes, input_splits, output_splits,
    num_bytes, group, root, peer, tag, coalesced, thread, flags).
    """

    def __init__(self, ring: Ring, sites: Sites) -> None:
        # Keyed by the address of its code, which the line keeps alive, plus the instruction's
        # offset. Two lines might share that sum, so a result is compared with the code.
        self.lines: dict[int, Line] = {}
        self._num_forgotten = 0
        self._find_site = sites.find
        self._signatures = Signatures(ring)
        self._calls: dict[tuple[Any, ...], tuple[int, int]] = {}
        ring.texts.when_a_part_is_full(self._forget)

    def find(
        self, frame: FrameType | None, call: tuple[Any, ...], tails: _Tails | None = None
    ) -> bytes:
        """Return a call's packed fields, and cache them for the calling line.

        Args:
            tails: the packed fields of earlier calls from the same line, keyed by call.
        """
        if tails is not None:
            try:
                found = tails.get(call)
            except TypeError:  # lists, which may change
                found = None
            if found is not None:
                return found
        key = call[:_SIGNATURE_FIELDS]
        num_bytes, group, root, peer, tag, coalesced, thread, flags = call[_SIGNATURE_FIELDS:]
        before = self._num_forgotten
        try:
            known = self._calls.get(key)
            is_hashable = True
        except TypeError:  # lists, which may change
            known, is_hashable = None, False
        if known is None:
            known = self._add(key, is_hashable)
        signature, timeout_ms = known
        first = user_frame(frame) if frame is not None else None
        site, stack = self._find_site(first) if first is not None else (0, 0)
        fields = (
            num_bytes, timeout_ms, group, signature, site, stack, root, peer, tag, coalesced,
            thread, flags,
        )  # fmt: skip
        try:
            tail = TAIL_STRUCT.pack(*fields)
        except struct.error:
            return pack_clamped(TAIL_STRUCT, *fields)
        if first is not None and is_hashable:
            if tails is None or len(tails) >= _MAX_TAILS:
                tails = {}
            line = (first.f_code, *_callers(first), call, tail, tails)
            where = id(first.f_code) + first.f_lasti
            if len(self.lines) >= _MAX_LINES:
                self.lines.clear()
            if self._num_forgotten == before:
                tails[call] = tail
                self.lines[where] = line
        return tail

    def _add(self, key: tuple[Any, ...], is_hashable: bool) -> tuple[int, int]:
        """Return a call's signature reference and timeout in ms, and cache both if possible."""
        operation, dtype, reduce_op, timeout_s, shapes, inputs, outputs = key
        signature = self._signatures.add(operation, dtype, reduce_op, shapes, inputs, outputs)
        known = signature, int(timeout_s * 1000) if 0 <= timeout_s <= MAX_TIMEOUT_S else 0
        if len(self._calls) >= MAX_CALLS:
            self._forget()
        if is_hashable:
            self._calls[key] = known
        return known

    def _forget(self) -> None:
        """Drop all cached references into `recent`."""
        self._num_forgotten += 1
        self._calls.clear()
        for line in list(self.lines.values()):
            line[-1].clear()  # another thread may be about to look here
        self.lines.clear()


def _callers(frame: FrameType) -> tuple[_Code, int, _Code, int, _Code, int]:
    """Return the code and the instruction offset of each of a frame's three nearest callers."""
    found: list[Any] = []
    caller = frame.f_back
    for _ in range(3):
        found += (None, -1) if caller is None else (caller.f_code, caller.f_lasti)
        caller = caller and caller.f_back
    return tuple(found)
