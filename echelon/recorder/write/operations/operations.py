"""Write operations in pure Python if the C core was not built.

[Note: why no lock] CPython 3.11 and later, with the global lock, switches threads only after calls
and at backward jumps. A sequence of statements without calls or backward jumps is therefore
atomic. Each change to a slot is made by such a sequence, so threads never overwrite each other's
data. A lock is taken only in rare cases, for example to reuse the slot of an operation that has not
ended. If the interpreter does not guarantee atomicity, `LockedOperations` is used, which holds a
lock in every method.

Readers, which are other processes, verify what they read (schema.py, [Note: what makes a slot
readable]).
"""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from echelon.recorder.format.schema import OPERATION_FIXED, OPERATION_SLOT, Live, State
from echelon.recorder.write.operations.calls import TAIL_STRUCT, Calls
from echelon.recorder.write.operations.numbers import moment, pack_clamped
from echelon.recorder.write.operations.signatures import Shapes, Splits
from echelon.recorder.write.ring.ring import Ring
from echelon.recorder.write.sites import Sites

NOT_RECORDED = -1

# An operation's fields: those that differ in each call of a line, then those that seldom do.
HEAD_STRUCT = struct.Struct(f"<Qqqqq{TAIL_STRUCT.size}s")
STATE_STRUCT = struct.Struct("<QqqIIIIQ")
_SLOT_STRUCT = struct.Struct(f"<QII{HEAD_STRUCT.size}s8xQ")
_STATE_BODY_STRUCT = struct.Struct("<qqII")
_STATE_CELL_STRUCT = struct.Struct(f"<Q{_STATE_BODY_STRUCT.size}sI4xQ")  # as STATE_STRUCT
assert HEAD_STRUCT.size == OPERATION_FIXED.itemsize

_SLOT_BYTES = OPERATION_SLOT.itemsize
_FIXED_BYTES = HEAD_STRUCT.size
_STATE_OFFSET = OPERATION_SLOT.fields["state"][1]  # type: ignore[index]
_getframe = sys._getframe
_pack_head = HEAD_STRUCT.pack
_pack_slot = _SLOT_STRUCT.pack_into
_pack_state = _STATE_CELL_STRUCT.pack_into
_pack_state_body = _STATE_BODY_STRUCT.pack
# Looking up a member of an enum costs as much as storing it.
_NUM_OPERATIONS = int(Live.NUM_OPERATIONS)
_PROGRESS = int(Live.PROGRESS_MONO_NS)
_STEP = int(Live.STEP)
_KEPT_REFUSED = int(Live.KEPT_REFUSED)
_MAX_TRIES = 64  # slots that are tried for one operation
_STARTED = int(State.STARTED)
_COMPLETED = int(State.COMPLETED)
_FAILED = int(State.FAILED)
assert crc32(b"", 1 << 32) == 0, "crc32 takes the lower half of a stamp"


class OperationWriter(Protocol):
    """The common interface of `Operations` and the C core's `Writer`."""

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
        """Record that an operation was called; return the number to pass to the other methods.

        Args:
            group: the group's reference, from `Recorder.group()`.
            num_bytes: the size of the input on this rank, in bytes.
            depth: the number of frames to skip in the search for user code; 1 means to start at the
                caller.
            is_started: True if the backend starts the operation immediately.
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
        """Preprocess the arguments of `begin` that are the same for many calls.

        Returns:
            The argument to pass to `begin_prepared`; None if the call cannot be recorded.
        """

    def begin_prepared(
        self, call: Any, sequence: int, coalesced: int, flags: int, depth: int, is_started: bool, /
    ) -> int:
        """Record a call to an operation, given arguments from `prepare`; see `begin`."""

    def started(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record when the backend started the operation."""

    def completed(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record when the operation completed on this rank."""

    def failed(self, record: int, error: int, /) -> None:
        """Record that the operation failed; `error` is a reference to the error's text."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.native_id = threading.get_native_id()


class _Outside:
    """A placeholder frame, used when a call stack has fewer frames than a call site needs."""

    f_code = None
    f_lasti = -1
    f_back = None


_OUTSIDE: Any = _Outside()


class Operations:
    """The pure-Python writer of operations. Its methods are thread-safe and never raise."""

    __slots__ = (
        "_calls", "_find", "_is_moving", "_kept", "_lines", "_live", "_lock", "_map", "_next",
        "_now", "_num_slots", "_owners", "_places", "_ring", "_starts", "_states", "_thread",
    )  # fmt: skip

    def __init__(
        self, ring: Ring, sites: Sites, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._ring = ring
        self._map = ring.map
        self._live = ring.live
        self._kept = ring.kept
        self._now = now
        self._num_slots = ring.num_operations
        offset = ring.layout.operations_offset
        self._places = [offset + slot * _SLOT_BYTES for slot in range(ring.num_operations)]
        self._states = [place + _STATE_OFFSET for place in self._places]
        # The stamp of the operation in each slot, negative once it has ended; and its start.
        self._owners = [0] * ring.num_operations
        self._starts = [0] * ring.num_operations
        self._lock = threading.RLock()  # a signal handler may record inside
        self._is_moving = False
        self._next = 0  # the number of the next operation
        self._thread = _Thread()
        self._calls = Calls(ring, sites)
        self._find = self._calls.find
        self._lines = self._calls.lines

    def begin(
        self,
        group: int,
        operation: str,
        # Not keyword-only: the interpreter looks up each default of such a parameter by its name.
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
            clock = self._now  # as a method call on a slot, it would be looked up each time
            now = clock()
            what = (
                operation, dtype, reduce_op, timeout_s, shapes, input_splits, output_splits,
                num_bytes, group, root, peer, tag, coalesced, self._thread.native_id, flags,
            )  # fmt: skip
            try:
                frame = _getframe(depth)
            except ValueError:  # the stack is not that deep
                frame = _OUTSIDE
            code = frame.f_code
            line = self._lines.get(id(code) + frame.f_lasti)
            if line is None:
                tail = self._find(frame if code else None, what)
            else:
                second = frame.f_back or _OUTSIDE
                third = second.f_back or _OUTSIDE
                fourth = third.f_back or _OUTSIDE
                code_1, code_2, at_2, code_3, at_3, code_4, at_4, known, tail, tails = line
                if (
                    code is not code_1
                    or second.f_lasti != at_2
                    or second.f_code is not code_2
                    or third.f_lasti != at_3
                    or third.f_code is not code_3
                    or fourth.f_lasti != at_4
                    or fourth.f_code is not code_4
                ):
                    tail = self._find(frame if code else None, what)
                elif what != known:
                    tail = self._find(frame, what, tails)
            record = self._next  # no call until the next line, so no number is drawn twice
            self._next = stamp = record + 1
            step = self._ring.step
            try:
                fields = _pack_head(record, sequence, p2p_sequence, now, step, tail)
            except struct.error:
                fields = pack_clamped(HEAD_STRUCT, record, sequence, p2p_sequence, now, step, tail)
            crc = crc32(fields)
            slot = record % self._num_slots
            owner = self._owners[slot]
            if owner <= 0 < stamp + owner:  # ended, and not newer; from here, nothing can intervene
                self._starts[slot] = 0
                self._owners[slot] = stamp
                _pack_slot(self._map, self._places[slot], stamp, _FIXED_BYTES, crc, fields, stamp)
            else:
                record = self._make_room(record, fields)
                if record == NOT_RECORDED:
                    return record
            live = self._live
            live[_NUM_OPERATIONS] = self._next  # never less than another thread has stored
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
        """Preprocess the arguments of `begin`; see `OperationWriter`."""
        try:
            int(group), int(num_bytes), int(root), float(timeout_s)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return None
        return operation, dtype, reduce_op, timeout_s, shapes, num_bytes, group, root

    def begin_prepared(
        self, call: Any, sequence: int, coalesced: int, flags: int, depth: int, is_started: bool, /
    ) -> int:
        """Record a call to an operation, given arguments from `prepare`; see `OperationWriter`."""
        try:
            (operation, dtype, reduce_op, timeout_s, shapes, num_bytes, group, root) = call
            return Operations.begin(
                self, group, operation, sequence, -1, dtype, shapes, (), (), num_bytes, reduce_op,
                root, -1, -1, coalesced, timeout_s, flags, depth + 1, is_started,
            )  # fmt: skip
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return NOT_RECORDED

    def started(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record when the backend started the operation."""
        try:
            now = self._now()
            if record >= 0:
                self._mark_started(record, now if at_mono_ns is None else moment(at_mono_ns, now))
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def completed(
        self,
        record: int,
        at_mono_ns: int | None = None,
        /,
        _state: int = _COMPLETED,
        _error: int = 0,
    ) -> None:
        """Record when the operation completed on this rank."""
        try:
            clock = self._now  # as a method call on a slot, it would be looked up each time
            self._live[_PROGRESS] = now = clock()
            if record < 0:
                return
            ended = now if at_mono_ns is None else moment(at_mono_ns, now)
            stamp = record + 1
            slot = record % self._num_slots
            owners, starts = self._owners, self._starts
            at = self._states[slot]
            while True:
                began = starts[slot]
                body = _pack_state_body(began, ended, _error, _state)
                crc = crc32(body, stamp)
                if owners[slot] == stamp and starts[slot] == began:
                    owners[slot] = -stamp  # from the comparison on, nothing can intervene
                    _pack_state(self._map, at, stamp, body, crc, stamp)
                    return
                if owners[slot] != stamp:
                    break
            if owners[slot] != -stamp:
                with self._lock:
                    self._kept.ended(stamp)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def failed(self, record: int, error: int, /) -> None:
        """Record that the operation failed; `error` is a reference to the error's text."""
        Operations.completed(self, record, None, _FAILED, error)

    def _make_room(self, record: int, fields: bytes) -> int:
        """Store an operation in the first available slot, without overwriting a pending operation.

        Returns:
            The operation's record number, or `NOT_RECORDED` if no slot is available.
        """
        with self._lock:
            for number in range(_MAX_TRIES):
                if number:
                    record = self._next
                    self._next = record + 1
                    fields = record.to_bytes(8, "little") + fields[8:]
                if self._take(record % self._num_slots, record + 1, fields):
                    return record
        self._live[_KEPT_REFUSED] += 1
        return NOT_RECORDED

    def _take(self, slot: int, stamp: int, fields: bytes) -> bool:
        """Store an operation in a slot, first moving any pending operation out of the slot.

        Return whether the operation was stored.
        """
        crc = crc32(fields)
        owner, began = self._owners[slot], self._starts[slot]
        while owner > 0:
            if owner >= stamp or not self._keep(slot):
                return False
            if self._owners[slot] == owner and self._starts[slot] == began:
                break
            self._kept.ended(owner)  # by now, it has started or ended in its slot
            owner, began = self._owners[slot], self._starts[slot]
        if self._owners[slot] != owner or -owner >= stamp:
            return False
        self._starts[slot] = 0
        self._owners[slot] = stamp
        _pack_slot(self._map, self._places[slot], stamp, _FIXED_BYTES, crc, fields, stamp)
        return True

    def _keep(self, slot: int) -> bool:
        """Copy a slot's operation to the section for retained operations, if possible.

        Return whether the operation was copied.
        """
        if self._is_moving:
            return False
        self._is_moving = True
        try:
            return self._kept.keep(slot)
        finally:
            self._is_moving = False

    def _mark_started(self, record: int, began: int) -> None:
        slot = record % self._num_slots
        stamp = record + 1
        body = _pack_state_body(began, 0, 0, _STARTED)
        crc = crc32(body, stamp)
        at = self._states[slot]
        if self._owners[slot] == stamp:  # from here on nothing can intervene
            self._starts[slot] = began
            _pack_state(self._map, at, stamp, body, crc, stamp)
        elif self._owners[slot] != -stamp:
            cell = STATE_STRUCT.pack(stamp, began, 0, 0, _STARTED, crc, 0, stamp)
            with self._lock:
                self._kept.started(stamp, cell)


class LockedOperations(Operations):
    """A writer of operations that holds a lock in every method."""

    __slots__ = ()

    def begin(self, *args: Any, depth: int = 1, **fields: Any) -> int:
        """Record that an operation was called; see `OperationWriter`."""
        with self._lock:
            return super().begin(*args, depth=depth + 1, **fields)  # type: ignore[misc]

    def begin_prepared(
        self, call: Any, sequence: int, coalesced: int, flags: int, depth: int, is_started: bool, /
    ) -> int:
        """Record a call to an operation, given arguments from `prepare`; see `OperationWriter`."""
        with self._lock:
            return super().begin_prepared(call, sequence, coalesced, flags, depth + 1, is_started)

    def started(self, record: int, at_mono_ns: int | None = None, /) -> None:
        """Record when the backend started the operation."""
        with self._lock:
            super().started(record, at_mono_ns)

    def completed(self, *args: Any) -> None:
        """Record when the operation completed on this rank."""
        with self._lock:
            super().completed(*args)

    def failed(self, record: int, error: int, /) -> None:
        """Record that the operation failed; `error` is a reference to the error's text."""
        with self._lock:
            super().failed(record, error)


def has_atomic_steps() -> bool:
    """Return whether operations can be written without a lock (see [Note: why no lock])."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and sys.version_info >= (3, 11) and has_lock


def make_operations(
    ring: Ring, sites: Sites, now: Callable[[], int] = time.monotonic_ns
) -> Operations:
    """Return a writer that records operations in `ring`. `now` returns the time in nanoseconds."""
    return (Operations if has_atomic_steps() else LockedOperations)(ring, sites, now)
