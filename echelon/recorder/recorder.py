"""The recorder: operations, spans, steps, a heartbeat, and last words, written into a ring.

It never raises into training, never touches a device, and allocates nothing after start but the
text of a call site that it has not met before. Which process has one is decided in `current.py`.
"""

from __future__ import annotations

import itertools
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Any
from zlib import crc32

from echelon.recorder import sites
from echelon.recorder.liveness import HEARTBEAT_S
from echelon.recorder.open_span import OpenSpan
from echelon.recorder.ring import OPERATION_FIXED_STRUCT, Ring
from echelon.recorder.schema import (
    MAX_DIMS,
    MAX_SPLITS,
    MAX_TENSORS,
    NUM_OPEN_SPANS,
    Flag,
    Identity,
    LastWords,
    Live,
    State,
    encode_ranks,
)

_Shapes = tuple[tuple[int, ...], ...]
_Splits = tuple[int, ...]

# references of operation, dtype and reduce op; timeout in ms; number of tensors; flags; tail
_Call = tuple[int, int, int, int, int, int, bytes]
pack_operation = OPERATION_FIXED_STRUCT.pack


def _range_of(code: str) -> tuple[int, int]:
    bits = 8 * struct.calcsize("<" + code)
    return (0, (1 << bits) - 1) if code.isupper() else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


NOT_RECORDED = -1
_MAX_CALLS = 4096  # cached encodings; a program with more dynamic shapes encodes again
_MAX_TIMEOUT_S = 1e9
_RANGES = [_range_of(code) for code in OPERATION_FIXED_STRUCT.format[1:]]
# Looking a member of an enum up costs as much as storing it.
_NUM_OPERATIONS = int(Live.NUM_OPERATIONS)
_PROGRESS = int(Live.PROGRESS_MONO_NS)
_COMPLETED = int(State.COMPLETED)
_MAX_STEP = (1 << 63) - 2
_ERROR_CHARS = 600
_WORDS_CHARS = 2000
_TRACE_CHARS = 6000
_BASES = 16


class _Thread(threading.local):
    """What is asked again and again about the calling thread."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.depth = 0  # of its open spans


class Recorder:
    """Record into a ring. All methods are thread-safe and none raises."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._live = ring.live
        self._numbers = itertools.count()
        self._span_numbers = itertools.count()
        self._span_records = itertools.count()
        self._num_ended_spans = itertools.count(1)
        self._coalesced_numbers = itertools.count()
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._sites = sites.Sites(ring.intern)
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._open_places = deque(range(NUM_OPEN_SPANS))
        self._thread = _Thread()
        self._step = -1
        self._beating: threading.Thread | None = None
        self._is_owner = True
        self.closing = threading.Event()

    @property
    def identity(self) -> Identity:
        """Who this black box says it belongs to."""
        return self._ring.identity

    def num_records(self) -> int:
        """Return how many operations and spans were recorded so far."""
        return self._live[Live.NUM_OPERATIONS] + self._live[Live.NUM_SPANS]

    def identify(self, **changes: Any) -> None:
        """Replace some of the identity's fields, such as the world size or the clock offset."""
        self._ring.write_identity(self._ring.identity.changed(**changes))

    def mark_initialised(self) -> None:
        """Note that the world group stands: from here on silence counts as a stall."""
        self._live[Live.INITIALISED] = 1
        self._live[Live.PROGRESS_MONO_NS] = monotonic_ns()

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Return the reference of a process group, for `begin`."""
        key = (name, tuple(ranks))
        known = self._groups.get(key)
        if known is None:
            known = self._ring.intern(f"{name}\n{encode_ranks(ranks)}")
            self._groups[key] = known
        return known

    def begin(
        self,
        group: int,
        operation: str,
        *,
        sequence: int = -1,
        p2p_sequence: int = -1,
        dtype: str = "",
        shapes: _Shapes = (),
        input_splits: _Splits = (),
        output_splits: _Splits = (),
        num_bytes: int = 0,
        reduce_op: str = "",
        root: int = -1,
        peer: int = -1,
        tag: int = -1,
        coalesced: int = -1,
        timeout_s: float = 0.0,
        flags: int = 0,
        depth: int = 1,
    ) -> int:
        """Record that an operation was called; return its number for the calls that follow.

        Args:
            group: from `group()`.
            num_bytes: bytes of the input on this rank.
            depth: frames between here and code that may be the user's; 1 is the caller.
        """
        now = monotonic_ns()
        key = (operation, dtype, reduce_op, timeout_s, shapes, input_splits, output_splits)
        operation_ref, dtype_ref, reduce_ref, timeout_ms, num_tensors, more_flags, tail = (
            self._calls.get(key) or self._new_call(key)
        )
        try:
            site, stack = self._sites.find(sys._getframe(depth))
        except ValueError:  # the stack is not that deep
            site = stack = 0
        record = next(self._numbers)
        fields = (
            record, sequence, p2p_sequence, now, self._step, num_bytes, timeout_ms,
            group, operation_ref, dtype_ref, reduce_ref, site, stack, root, peer, tag, coalesced,
            self._thread.native_id, flags | more_flags, num_tensors,
        )  # fmt: skip
        try:
            payload = pack_operation(*fields)
        except struct.error:
            payload = pack_operation(*_clamped(fields))
        self._ring.write_operation(record, payload + tail)
        self._live[_NUM_OPERATIONS] = record + 1
        self._live[_PROGRESS] = now
        return record

    def started(self, record: int) -> None:
        """Record that the backend took the operation up."""
        self._ring.mark_started(record, monotonic_ns())

    def completed(self, record: int, at_mono_ns: int | None = None) -> None:
        """Record that the operation is done on this rank, now or at a time already past."""
        now = monotonic_ns()
        self._ring.mark_ended(record, at_mono_ns or now, _COMPLETED)
        self._live[_PROGRESS] = now

    def failed(self, record: int, error: BaseException) -> None:
        """Record that the operation ended in an error."""
        now = monotonic_ns()
        text = self._ring.intern(f"{type(error).__name__}: {_said(error)}"[:_ERROR_CHARS])
        self._ring.mark_ended(record, now, State.FAILED, text)
        self._live[Live.PROGRESS_MONO_NS] = now

    def new_group(self, name: str, ranks: Sequence[int]) -> int:
        """Return the reference of a group that has just been made.

        Groups are told apart by name and members. Where these were seen before, say because the
        world was left and joined again, the name gets a number, so that sequences never mix; all
        members make their groups in the same order, so they agree on it.
        """
        key, number = (name, tuple(ranks)), 1
        while key in self._groups:
            number += 1
            key = (f"{name}#{number}", tuple(ranks))
        return self.group(*key)

    def next_coalesced(self) -> int:
        """Return the number of a new block of coalesced operations."""
        return next(self._coalesced_numbers)

    def step(self, number: int | None = None) -> None:
        """Note that a training step begins: number `number`, or one more than the last."""
        now = monotonic_ns()
        self._step = self._step + 1 if number is None else min(max(number, -1), _MAX_STEP)
        self._live[Live.STEP] = self._step + 1
        self._live[Live.STEP_MONO_NS] = now
        self._live[Live.PROGRESS_MONO_NS] = now

    def open_span(self, name: str, detail: str, depth: int) -> OpenSpan:
        """Record that a phase begins."""
        now = monotonic_ns()
        level = self._thread.depth
        self._thread.depth = level + 1
        try:
            place = self._open_places.popleft()
        except IndexError:
            place = -1
            self._live[Live.OPEN_SPANS_REFUSED] += 1
        site, _ = self._sites.find(sys._getframe(depth))
        intern = self._ring.intern
        span = OpenSpan(
            next(self._span_numbers),
            now,
            self._step,
            intern(str(name)[:_ERROR_CHARS]),
            intern(str(detail)[:_ERROR_CHARS]),
            site,
            self._thread.native_id,
            level,
            place,
        )
        if place >= 0:
            self._ring.write_open_span(place, span.number, span.pack(0))
        self._live[Live.PROGRESS_MONO_NS] = now
        return span

    def close_span(self, span: OpenSpan) -> None:
        """Record that a phase ended."""
        now = monotonic_ns()
        if span.thread == self._thread.native_id:
            self._thread.depth = span.depth
        fields = span.pack(now)
        self._ring.write_span(next(self._span_records), fields)
        if span.place >= 0:
            self._ring.write_open_span(span.place, span.number, fields)
            self._open_places.append(span.place)
        self._live[Live.NUM_SPANS] = next(self._num_ended_spans)
        self._live[Live.PROGRESS_MONO_NS] = now

    def text(self, text: str) -> int:
        """Return the reference of a text, for `note_pause`."""
        return self._ring.intern(text)

    def note_pause(self, name: int, detail: int, began: int, ended: int, keep: bool) -> None:
        """Count a pause of the whole process, and keep it as a span if asked. It is no progress.

        Takes no lock and stores no text: it may be called between any two instructions.
        """
        self._live[Live.NUM_GC_PAUSES] += 1
        self._live[Live.GC_PAUSES_NS] += ended - began
        if not keep:
            return
        thread = self._thread
        span = OpenSpan(
            next(self._span_numbers), began, self._step, name, detail, 0, thread.native_id,
            thread.depth, -1,
        )  # fmt: skip
        self._ring.write_span(next(self._span_records), span.pack(ended))

    def last_words(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Record the exception that ends this process."""
        if not self._is_owner:
            return
        frames = list(traceback.walk_tb(trace))
        own = [pair for pair in frames if sites.is_user_code(pair[0].f_code)] or frames
        site = ""
        if own:
            frame, line = own[-1]
            site = f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        words = LastWords(
            type=f"{kind.__module__}.{kind.__qualname__}",
            message=_said(error)[:_WORDS_CHARS],
            site=site,
            traceback="".join(traceback.format_exception(kind, error, trace))[-_TRACE_CHARS:],
            mono_ns=monotonic_ns(),
            bases=tuple(f"{b.__module__}.{b.__qualname__}" for b in kind.__mro__[1:-1][:_BASES]),
        )
        self._ring.write_last_words(words)

    def start_heartbeat(self) -> None:
        """Start the thread whose stamp goes stale while C code holds the GIL."""
        self._live[Live.HEARTBEAT_MONO_NS] = monotonic_ns()
        self._beating = threading.Thread(target=self._beat, name="echelon-heartbeat", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Note an orderly end and stop the heartbeat. The file stays."""
        self.closing.set()
        if self._beating is not None:
            self._beating.join(timeout=2 * HEARTBEAT_S)
        self._live[Live.CLOSED] = 1

    def disown(self) -> None:
        """Write no more last words or end: this is a forked child, the ring is its parent's."""
        self._is_owner = False

    def _beat(self) -> None:
        while not self.closing.wait(HEARTBEAT_S):
            self._live[Live.HEARTBEAT_MONO_NS] = monotonic_ns()

    def _new_call(self, key: tuple[Any, ...]) -> _Call:
        """Encode what a call site passes again and again; kept, up to a limit."""
        operation, dtype, reduce_op, timeout_s, shapes, inputs, outputs = key
        intern = self._ring.intern
        flags, num_tensors, tail = encode_signature(shapes, inputs, outputs)
        call = (
            intern(operation),
            intern(dtype),
            intern(reduce_op),
            int(timeout_s * 1000) if 0 <= timeout_s <= _MAX_TIMEOUT_S else 0,
            num_tensors,
            flags,
            tail,
        )
        if len(self._calls) < _MAX_CALLS:
            self._calls[key] = call
        return call


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- a broken __str__ must not hide the error itself
        return "<no text>"


def _clamped(fields: tuple[int, ...]) -> list[int]:
    """Bring what a caller passed into its field's range: recording never raises."""
    out = []
    for value, (low, high) in zip(fields, _RANGES, strict=True):
        out.append(min(max(int(value), low), high))
    return out


def encode_signature(shapes: _Shapes, inputs: _Splits, outputs: _Splits) -> tuple[int, int, bytes]:
    """Return (flags, number of tensors, tail bytes), which `decode_signature` reads back."""
    counts = len(inputs).to_bytes(4, "little") + len(outputs).to_bytes(4, "little")
    fits = (
        len(shapes) <= MAX_TENSORS
        and all(len(shape) <= MAX_DIMS for shape in shapes)
        and len(inputs) + len(outputs) <= MAX_SPLITS
    )
    numbers = [n for shape in shapes for n in shape] + [*inputs, *outputs]
    data = b"".join(int(n).to_bytes(8, "little", signed=True) for n in numbers)
    if fits:
        return 0, len(shapes), counts + bytes(len(shape) for shape in shapes) + data
    numel = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        numel += size
    summary = (len(shapes), numel, crc32(data))
    packed = b"".join(n.to_bytes(8, "little", signed=True) for n in summary)
    return int(Flag.SUMMARISED), 0, counts + packed
