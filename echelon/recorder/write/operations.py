"""The writer of operations in Python: where the C core was not built, and its oracle in tests.

Writers take turns by one lock; readers, which are other processes, check what they see (schema.py,
[Note: what makes a slot readable]).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from echelon.recorder.format.schema import (
    MAX_DIMS,
    MAX_SPLITS,
    MAX_TENSORS,
    OPERATION_FIXED,
    OPERATION_SLOT,
    Flag,
    Live,
    State,
)
from echelon.recorder.write.ring import Ring
from echelon.recorder.write.sites import Sites

Shapes = tuple[tuple[int, ...], ...]
Splits = tuple[int, ...]

NOT_RECORDED = -1
MAX_CALLS = 4096  # cached signatures; a program with more dynamic shapes encodes again
MAX_TIMEOUT_S = 1e9

FIXED_STRUCT = struct.Struct("<QqqqqqqIIIIiiiiII")
STATE_STRUCT = struct.Struct("<QqqIIIIQ")
_SIGNATURE_STRUCT = struct.Struct("<IIIHH")
_SLOT_STRUCT = struct.Struct(f"<QII{FIXED_STRUCT.size}s8xQ")
_STATE_BODY_STRUCT = struct.Struct("<qqII")
assert FIXED_STRUCT.size == OPERATION_FIXED.itemsize

_SLOT_BYTES = OPERATION_SLOT.itemsize
_FIXED_BYTES = FIXED_STRUCT.size
_STATE_OFFSET = OPERATION_SLOT.fields["state"][1]  # type: ignore[index]
_pack_fixed = FIXED_STRUCT.pack
_pack_slot = _SLOT_STRUCT.pack_into
_pack_state = STATE_STRUCT.pack_into
_pack_state_body = _STATE_BODY_STRUCT.pack
# Looking up a member of an enum costs as much as storing it.
_NUM_OPERATIONS = int(Live.NUM_OPERATIONS)
_PROGRESS = int(Live.PROGRESS_MONO_NS)
_STEP = int(Live.STEP)
_KEPT_REFUSED = int(Live.KEPT_REFUSED)
_MAX_TRIES = 64  # slots that are looked at for one operation
_STARTED = int(State.STARTED)
_COMPLETED = int(State.COMPLETED)
_FAILED = int(State.FAILED)
_U32 = 0xFFFFFFFF
_I64 = (-(1 << 63), (1 << 63) - 1)


class OperationWriter(Protocol):
    """Writes operations into a ring: `Operations` here, or the C core's `Writer`."""

    def begin(
        self,
        group: int,
        operation: str,
        *,
        sequence: int = -1,
        p2p_sequence: int = -1,
        dtype: str = "",
        shapes: Shapes = (),
        input_splits: Splits = (),
        output_splits: Splits = (),
        num_bytes: int = 0,
        reduce_op: str = "",
        root: int = -1,
        peer: int = -1,
        tag: int = -1,
        coalesced: int = -1,
        timeout_s: float = 0.0,
        flags: int = 0,
        depth: int = 1,
        is_started: bool = False,
    ) -> int:
        """Record that an operation was called; return its number for the calls that follow.

        Args:
            group: from `Recorder.group()`.
            num_bytes: bytes of the input on this rank.
            depth: frames between here and code that may be the user's; 1 is the caller.
            is_started: the backend starts it at once.
        """

    def prepare(
        self,
        group: int,
        operation: str,
        dtype: str,
        shapes: Shapes,
        num_bytes: int,
        reduce_op: str,
        root: int,
        timeout_s: float,
        /,
    ) -> Any:
        """Read what a call passes again and again; see `begin`.

        Returns:
            What `begin_prepared` takes; None if it cannot be recorded.
        """

    def begin_prepared(
        self, call: Any, sequence: int, coalesced: int, flags: int, depth: int, is_started: bool, /
    ) -> int:
        """Record that a prepared operation was called, as `begin` does."""

    def started(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record that the backend started the operation, now or at a time already past."""

    def completed(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record that the operation is done on this rank, now or at a time already past."""

    def failed(self, record: int, error: int, /) -> None:
        """Record that the operation ended in an error, whose text `error` refers to."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.native_id = threading.get_native_id()


class Operations:
    """See `OperationWriter`. Thread-safe; no method raises."""

    def __init__(
        self, ring: Ring, sites: Sites, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._map = ring.map
        self._live = ring.live
        self._kept = ring.kept
        self._find = sites.find
        self._now = now
        self._num_slots = ring.num_operations
        self._offset = ring.layout.operations_offset
        self._stamps = array("Q", bytes(8 * ring.num_operations))  # who owns each slot now
        self._started = array("q", bytes(8 * ring.num_operations))
        self._ended = array("Q", bytes(8 * ring.num_operations))  # the last one of each that ended
        # Held from an operation's number to its slot's last byte: no thread ever overwrites, or
        # keeps, what another one is still writing. A signal handler may record inside.
        self._lock = threading.RLock()
        self._numbers = itertools.count().__next__
        self._thread = _Thread()
        self._signatures = Signatures(ring)
        self._calls: dict[tuple[Any, ...], tuple[int, int]] = {}
        ring.texts.when_a_part_is_full(self._calls.clear)

    def begin(
        self,
        group: int,
        operation: str,
        *,
        sequence: int = -1,
        p2p_sequence: int = -1,
        dtype: str = "",
        shapes: Shapes = (),
        input_splits: Splits = (),
        output_splits: Splits = (),
        num_bytes: int = 0,
        reduce_op: str = "",
        root: int = -1,
        peer: int = -1,
        tag: int = -1,
        coalesced: int = -1,
        timeout_s: float = 0.0,
        flags: int = 0,
        depth: int = 1,
        is_started: bool = False,
    ) -> int:
        """Record that an operation was called; see `OperationWriter`."""
        try:
            now = self._now()
            key = (operation, dtype, reduce_op, timeout_s, shapes, input_splits, output_splits)
            try:
                signature, timeout_ms = self._calls[key]
            except (KeyError, TypeError):
                signature, timeout_ms = self._new_call(key)
            try:
                site, stack = self._find(sys._getframe(depth))
            except ValueError:  # the stack is not that deep
                site = stack = 0
            live = self._live
            thread = self._thread.native_id
            with self._lock:
                record = self._numbers()
                try:
                    payload = _pack_fixed(
                        record, sequence, p2p_sequence, now, live[_STEP] - 1, num_bytes, timeout_ms,
                        group, signature, site, stack, root, peer, tag, coalesced, thread, flags,
                    )  # fmt: skip
                except struct.error:
                    fields = (
                        record, sequence, p2p_sequence, now, live[_STEP] - 1, num_bytes, timeout_ms,
                        group, signature, site, stack, root, peer, tag, coalesced, thread, flags,
                    )  # fmt: skip
                    payload = _pack_fixed(*_clamped(fields))
                slot = record % self._num_slots
                before = self._stamps[slot]
                if self._ended[slot] != before or before > record:
                    record = self._make_room(record)
                    if record == NOT_RECORDED:
                        return record
                    slot = record % self._num_slots
                    payload = record.to_bytes(8, "little") + payload[8:]
                stamp = record + 1
                self._stamps[slot] = stamp
                self._started[slot] = 0
                at = self._offset + slot * _SLOT_BYTES
                _pack_slot(self._map, at, stamp, _FIXED_BYTES, crc32(payload), payload, stamp)
                live[_NUM_OPERATIONS] = stamp
                live[_PROGRESS] = now
                if is_started:
                    self._mark_started(record, now)
            return record
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return NOT_RECORDED

    def prepare(
        self,
        group: int,
        operation: str,
        dtype: str,
        shapes: Shapes,
        num_bytes: int,
        reduce_op: str,
        root: int,
        timeout_s: float,
        /,
    ) -> Any:
        """Read what a call passes again and again; see `OperationWriter`."""
        try:
            int(group), int(num_bytes), int(root), float(timeout_s)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return None
        same = {
            "dtype": dtype,
            "shapes": shapes,
            "num_bytes": num_bytes,
            "reduce_op": reduce_op,
            "root": root,
            "timeout_s": timeout_s,
        }
        return group, operation, same

    def begin_prepared(
        self, call: Any, sequence: int, coalesced: int, flags: int, depth: int, is_started: bool, /
    ) -> int:
        """Record that a prepared operation was called; see `OperationWriter`."""
        try:
            group, operation, same = call
            return self.begin(
                group, operation, sequence=sequence, coalesced=coalesced, flags=flags,
                depth=depth + 1, is_started=is_started, **same,
            )  # fmt: skip
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return NOT_RECORDED

    def started(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record that the backend started the operation, now or at a time already past."""
        try:
            now = self._now()
            with self._lock:
                self._mark_started(record, now if at_mono_ns is None else _moment(at_mono_ns, now))
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def completed(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record that the operation is done on this rank, now or at a time already past."""
        try:
            now = self._now()
            ended = now if at_mono_ns is None else _moment(at_mono_ns, now)
            self._mark_ended(record, ended, _COMPLETED, 0, now)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def failed(self, record: int, error: int, /) -> None:
        """Record that the operation ended in an error, whose text `error` refers to."""
        try:
            now = self._now()
            self._mark_ended(record, now, _FAILED, error, now)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def _make_room(self, record: int) -> int:
        """Find the number whose slot can be taken, from `record` on; the lock is held.

        What has not ended is never overwritten: it moves out, or its slot is passed by.

        Returns:
            The number; NOT_RECORDED without one among the next slots.
        """
        for _ in range(_MAX_TRIES - 1):
            if self._is_free(record % self._num_slots, record + 1):
                return record
            record = self._numbers()
        if self._is_free(record % self._num_slots, record + 1):
            return record
        self._live[_KEPT_REFUSED] += 1
        return NOT_RECORDED

    def _is_free(self, slot: int, stamp: int) -> bool:
        before = self._stamps[slot]
        if before >= stamp:  # a signal handler recorded a whole round within this very call
            return False
        return self._ended[slot] == before or self._kept.keep(slot)

    def _mark_started(self, record: int, now: int) -> None:
        if not isinstance(record, int) or record < 0:
            return
        slot, stamp = record % self._num_slots, record + 1
        crc = crc32(_pack_state_body(now, 0, 0, _STARTED), stamp & _U32)
        cell = (stamp, now, 0, 0, _STARTED, crc, 0, stamp)
        if self._stamps[slot] != stamp:
            self._kept.started(stamp, STATE_STRUCT.pack(*cell))
            return
        self._started[slot] = now
        _pack_state(self._map, self._offset + slot * _SLOT_BYTES + _STATE_OFFSET, *cell)

    def _mark_ended(self, record: int, ended: int, state: int, error: int, now: int) -> None:
        with self._lock:
            if isinstance(record, int) and record >= 0:
                slot, stamp = record % self._num_slots, record + 1
                if self._stamps[slot] == stamp:
                    started = self._started[slot]
                    self._ended[slot] = stamp
                    crc = crc32(_pack_state_body(started, ended, error, state), stamp & _U32)
                    at = self._offset + slot * _SLOT_BYTES + _STATE_OFFSET
                    _pack_state(self._map, at, stamp, started, ended, error, state, crc, 0, stamp)
                else:
                    self._kept.ended(stamp)
            self._live[_PROGRESS] = now

    def _new_call(self, key: tuple[Any, ...]) -> tuple[int, int]:
        """Encode what a call site passes again and again; kept, up to a limit."""
        operation, dtype, reduce_op, timeout_s, shapes, inputs, outputs = key
        signature = self._signatures.add(operation, dtype, reduce_op, shapes, inputs, outputs)
        call = signature, int(timeout_s * 1000) if 0 <= timeout_s <= MAX_TIMEOUT_S else 0
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        with contextlib.suppress(TypeError):  # lists do, but cannot be cached
            self._calls[key] = call
        return call


class Signatures:
    """Entries of `recent` that say what an operation was called with."""

    def __init__(self, ring: Ring) -> None:
        self._texts = ring.texts
        self._known: dict[bytes, int] = {}
        self._texts.when_a_part_is_full(self._known.clear)

    def add(
        self,
        operation: str,
        dtype: str,
        reduce_op: str,
        shapes: Shapes,
        inputs: Splits,
        outputs: Splits,
    ) -> int:
        """Return the position of a signature, storing it if it is not among the newest."""
        intern = self._texts.intern
        flags, num_tensors, tail = encode_signature(shapes, inputs, outputs)
        refs = intern(str(operation)), intern(str(dtype)), intern(str(reduce_op))
        data = _SIGNATURE_STRUCT.pack(*refs, num_tensors, flags) + tail
        known = self._known.get(data)
        if known is None:
            if len(self._known) >= MAX_CALLS:
                self._known.clear()
            known = self._texts.append(data)
            if known:
                self._known[data] = known
        return known


def encode_signature(shapes: Shapes, inputs: Splits, outputs: Splits) -> tuple[int, int, bytes]:
    """Return (flags, number of tensors, tail bytes), which `decode_signature` reads back."""
    counts = len(inputs).to_bytes(4, "little") + len(outputs).to_bytes(4, "little")
    fits = (
        len(shapes) <= MAX_TENSORS
        and all(len(shape) <= MAX_DIMS for shape in shapes)
        and len(inputs) + len(outputs) <= MAX_SPLITS
    )
    numbers = [_i64(n) for shape in shapes for n in shape]
    numbers += [_i64(n) for n in (*inputs, *outputs)]
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    if fits:
        return 0, len(shapes), counts + bytes(len(shape) for shape in shapes) + data
    numel = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= int(n)
        numel += size
    summary = struct.pack("<3q", len(shapes), _i64(numel), crc32(data))
    return int(Flag.SUMMARISED), 0, counts + summary


def _i64(number: Any) -> int:
    return min(max(int(number), _I64[0]), _I64[1])


def _moment(at_mono_ns: Any, now: int) -> int:
    """Return a stamp that the caller passed, or now for what is not one."""
    try:
        return _i64(at_mono_ns) or now
    except (TypeError, ValueError, OverflowError):
        return now


def _range_of(code: str) -> tuple[int, int]:
    bits = 8 * struct.calcsize("<" + code)
    return (0, (1 << bits) - 1) if code.isupper() else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


_RANGES = [_range_of(code) for code in FIXED_STRUCT.format[1:]]


def _clamped(fields: tuple[int, ...]) -> list[int]:
    """Bring what a caller passed into its field's range."""
    out = []
    for value, (low, high) in zip(fields, _RANGES, strict=True):
        out.append(min(max(int(value), low), high))
    return out
