"""The recorder of this process: operations, spans, steps, a heartbeat, and last words.

One process has at most one. It records into `ring.py`'s file, which the launcher names in the
environment (ECHELON_RANK_DIR); without one, or with ECHELON_RECORDER_SIZE=0, every call here is a
cheap no-op, so that code which records never asks whether it does.

It never raises into training, never touches a device, and allocates nothing after start but the
text of a call site that it has not met before.

[Note: who may record] A ring belongs to one process. A fork inherits the mapping, so in the child
the recorder is switched off (`os.register_at_fork`); a process that multiprocessing started, or
that finds the ring file already there, does not record at all. Else a DataLoader's workers would
write their parent's story.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from zlib import crc32

from echelon.recorder import sites
from echelon.recorder.environment import Settings
from echelon.recorder.ring import OPERATION_FIXED_STRUCT, SPAN_FIXED_STRUCT, Ring
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

_T = TypeVar("_T")
_Shapes = tuple[tuple[int, ...], ...]
_Splits = tuple[int, ...]

HEARTBEAT_S = 0.5
NOT_RECORDED = -1
_MAX_SIGNATURES = 4096  # cached encodings; a program with more dynamic shapes encodes again
_ERROR_CHARS = 600


@dataclass(frozen=True, slots=True)
class _Signature:
    """A signature ready to be written."""

    dtype: int
    tail: bytes
    num_tensors: int
    flags: int


class Recorder:
    """Record into a ring. All methods are thread-safe and none raises."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._live = ring.live
        self._numbers = itertools.count()
        self._span_numbers = itertools.count()
        self._span_records = itertools.count()
        self._coalesced_numbers = itertools.count()
        self._signatures: dict[tuple[Any, ...], _Signature] = {}
        self._sites: dict[tuple[object, ...], tuple[int, int]] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._open_places = deque(range(NUM_OPEN_SPANS))
        self._depth = threading.local()
        self._step = -1
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None

    @property
    def identity(self) -> Identity:
        """Who this black box says it belongs to."""
        return self._ring.identity

    def identify(self, **changes: Any) -> None:
        """Replace some of the identity's fields, such as the world size or the clock offset."""
        self._ring.write_identity(self._ring.identity.changed(**changes))

    def mark_initialised(self) -> None:
        """Note that the world group stands: from here on silence counts as a stall."""
        self._live[Live.INITIALISED] = 1
        self._live[Live.PROGRESS_MONO_NS] = time.monotonic_ns()

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
            depth: frames between here and code that may be the user's.
        """
        now = time.monotonic_ns()
        record = next(self._numbers)
        signature = self._signature(dtype, shapes, input_splits, output_splits)
        site, stack = self._site(depth + 1)
        intern = self._ring.intern
        payload = (
            OPERATION_FIXED_STRUCT.pack(
                record,
                sequence,
                p2p_sequence,
                now,
                self._step,
                num_bytes,
                int(timeout_s * 1000),
                group,
                intern(operation),
                signature.dtype,
                intern(reduce_op),
                site,
                stack,
                root,
                peer,
                tag,
                coalesced,
                threading.get_native_id(),
                signature.flags | flags,
                signature.num_tensors,
            )
            + signature.tail
        )
        self._ring.write_operation(record, payload)
        self._live[Live.NUM_OPERATIONS] = record + 1
        self._live[Live.PROGRESS_MONO_NS] = now
        return record

    def started(self, record: int) -> None:
        """Record that the backend took the operation up."""
        self._ring.mark_started(record, time.monotonic_ns())

    def completed(self, record: int) -> None:
        """Record that the operation is done on this rank."""
        now = time.monotonic_ns()
        self._ring.mark_ended(record, now, State.COMPLETED)
        self._live[Live.PROGRESS_MONO_NS] = now

    def failed(self, record: int, error: BaseException) -> None:
        """Record that the operation ended in an error."""
        now = time.monotonic_ns()
        text = self._ring.intern(f"{type(error).__name__}: {error}"[:_ERROR_CHARS])
        self._ring.mark_ended(record, now, State.FAILED, text)
        self._live[Live.PROGRESS_MONO_NS] = now

    def next_coalesced(self) -> int:
        """Return the number of a new block of coalesced operations."""
        return next(self._coalesced_numbers)

    def step(self, number: int | None = None) -> None:
        """Note that a training step begins: number `number`, or one more than the last."""
        now = time.monotonic_ns()
        self._step = self._step + 1 if number is None else number
        self._live[Live.STEP] = self._step + 1
        self._live[Live.STEP_MONO_NS] = now
        self._live[Live.PROGRESS_MONO_NS] = now

    def open_span(self, name: str, detail: str, depth: int) -> _OpenSpan:
        """Record that a phase begins."""
        now = time.monotonic_ns()
        level = getattr(self._depth, "value", 0)
        self._depth.value = level + 1
        try:
            place = self._open_places.popleft()
        except IndexError:
            place = -1
            self._live[Live.OPEN_SPANS_REFUSED] += 1
        site, _ = self._site(depth + 1)
        intern = self._ring.intern
        span = _OpenSpan(
            next(self._span_numbers),
            now,
            self._step,
            intern(name),
            intern(detail[:_ERROR_CHARS]),
            site,
            threading.get_native_id(),
            level,
            place,
        )
        if place >= 0:
            self._ring.write_open_span(place, span.number, span.pack(0))
        self._live[Live.PROGRESS_MONO_NS] = now
        return span

    def close_span(self, span: _OpenSpan) -> None:
        """Record that a phase ended."""
        now = time.monotonic_ns()
        self._depth.value = span.depth
        fields = span.pack(now)
        number = next(self._span_records)
        self._ring.write_span(number, fields)
        if span.place >= 0:
            self._ring.write_open_span(span.place, span.number, fields)
            self._open_places.append(span.place)
        self._live[Live.NUM_SPANS] = number + 1
        self._live[Live.PROGRESS_MONO_NS] = now

    def last_words(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Record the exception that ends this process."""
        frames = list(traceback.walk_tb(trace))
        own = [pair for pair in frames if sites.is_user_code(pair[0].f_code)] or frames
        site = ""
        if own:
            frame, line = own[-1]
            site = f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        words = LastWords(
            type=f"{kind.__module__}.{kind.__qualname__}",
            message=str(error),
            site=site,
            traceback="".join(traceback.format_exception(kind, error, trace)),
            mono_ns=time.monotonic_ns(),
            bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__[1:-1]),
        )
        self._ring.write_last_words(words)

    def start_heartbeat(self) -> None:
        """Start the thread whose stamp goes stale while C code holds the GIL."""
        self._live[Live.HEARTBEAT_MONO_NS] = time.monotonic_ns()
        self._beating = threading.Thread(target=self._beat, name="echelon-heartbeat", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Note an orderly end and stop the heartbeat. The file stays."""
        self._stop.set()
        if self._beating is not None:
            self._beating.join(timeout=2 * HEARTBEAT_S)
        self._live[Live.CLOSED] = 1

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._live[Live.HEARTBEAT_MONO_NS] = time.monotonic_ns()

    def _site(self, depth: int) -> tuple[int, int]:
        frame = sites.caller(depth)
        if frame is None:
            return 0, 0
        key = sites.chain(frame)
        known = self._sites.get(key)
        if known is None:
            intern = self._ring.intern
            known = intern(sites.describe(frame)), intern(sites.stack(frame))
            self._sites[key] = known
        return known

    def _signature(
        self, dtype: str, shapes: _Shapes, inputs: _Splits, outputs: _Splits
    ) -> _Signature:
        key = (dtype, shapes, inputs, outputs)
        known = self._signatures.get(key)
        if known is None:
            flags, num_tensors, tail = encode_signature(shapes, inputs, outputs)
            known = _Signature(self._ring.intern(dtype), tail, num_tensors, flags)
            if len(self._signatures) < _MAX_SIGNATURES:
                self._signatures[key] = known
        return known


class _OpenSpan:
    """A span that has begun: what is needed to write its end."""

    __slots__ = (
        "depth",
        "detail",
        "name",
        "number",
        "place",
        "site",
        "started",
        "step",
        "thread",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        started: int,
        step: int,
        name: int,
        detail: int,
        site: int,
        thread: int,
        depth: int,
        place: int,
    ) -> None:
        self.number = number
        self.started = started
        self.step = step
        self.name = name
        self.detail = detail
        self.site = site
        self.thread = thread
        self.depth = depth
        self.place = place

    def pack(self, ended: int) -> bytes:
        return SPAN_FIXED_STRUCT.pack(
            self.number, self.started, ended, self.step, self.name, self.detail, self.site,
            self.thread, self.depth, 0,
        )  # fmt: skip


def encode_signature(shapes: _Shapes, inputs: _Splits, outputs: _Splits) -> tuple[int, int, bytes]:
    """Return (flags, number of tensors, tail bytes); `read.decode_signature` reads them back."""
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


# ---- the recorder of this process ----

_recorder: Recorder | None = None
_opened = False
_open_lock = threading.Lock()
_stack_file: IO[bytes] | None = None


def current() -> Recorder | None:
    """Return this process's recorder, opening it on the first call; None if nothing is recorded."""
    return _recorder if _opened else _open()


def _open() -> Recorder | None:
    global _recorder, _opened
    with _open_lock:
        if _opened:
            return _recorder
        _opened = True
        settings = Settings.from_environment()
        if settings.directory is None or settings.num_operations == 0 or not _may_record():
            return None
        try:
            _recorder = _start(settings, settings.directory)
        except FileExistsError:
            return None  # the ring has an owner: [Note: who may record]
        except OSError as err:
            warnings.warn(f"not recording: {settings.directory}: {err}", stacklevel=3)
        return _recorder


def _may_record() -> bool:
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is None or multiprocessing.parent_process() is None


def _start(settings: Settings, directory: Path) -> Recorder:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ring = Ring(
        directory / "ring",
        _identity(settings),
        num_operations=settings.num_operations,
        num_spans=settings.num_spans,
    )
    recorder = Recorder(ring)
    ring.write_identity(
        ring.identity.changed(stack_signal=_register_stacks(directory, settings.stack_signal))
    )
    recorder.start_heartbeat()
    _chain_excepthook(recorder)
    atexit.register(recorder.close)
    return recorder


def _identity(settings: Settings) -> Identity:
    return Identity(
        rank=settings.rank,
        local_rank=settings.local_rank,
        world_size=settings.world_size,
        attempt=settings.attempt,
        job_id=settings.job_id,
        host=socket.gethostname(),
        boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
        pid=os.getpid(),
        pid_start_ticks=_start_ticks(),
        mono_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        settings=settings.allowed(),
    )


def _register_stacks(directory: Path, number: int) -> int:
    """Let the agent ask for the stacks of all threads by a signal that nobody else uses."""
    global _stack_file
    if number == 0 or not hasattr(faulthandler, "register"):
        return 0
    if signal.getsignal(number) is not signal.SIG_DFL:
        return 0
    _stack_file = (directory / "stacks").open("ab", buffering=0)
    faulthandler.register(number, file=_stack_file, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a segfault then names its line on stderr
    return number


def _chain_excepthook(recorder: Recorder) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            recorder.last_words(kind, error, trace)
        except Exception as err:  # noqa: BLE001 -- the user's own error must still be shown
            print(f"echelon: the last words were not recorded: {err}", file=sys.stderr)
        previous(kind, error, trace)

    sys.excepthook = hook


def _forget_after_fork() -> None:
    global _recorder, _opened
    if _recorder is not None:
        atexit.unregister(_recorder.close)
    _recorder = None
    _opened = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _start_ticks() -> int:
    """Field 22 of /proc/self/stat: with the pid it names a process for ever."""
    text = _first_line("/proc/self/stat")
    return int(text.rpartition(")")[2].split()[19]) if text else 0


# ---- what users call ----


class span:  # noqa: N801 -- reads as a statement: `with span("data_wait"):`
    """Mark a phase of the step: `with span("data_wait"): batch = next(batches)`.

    Known to verdicts: data_wait, compute, checkpoint, compile, store. Any other name is yours.
    """

    __slots__ = ("_detail", "_name", "_open")

    def __init__(self, name: str, detail: str = "") -> None:
        self._name = name
        self._detail = detail
        self._open: _OpenSpan | None = None

    def __enter__(self) -> None:
        recorder = current()
        if recorder is not None:
            self._open = recorder.open_span(self._name, self._detail, 1)

    def __exit__(self, *_: object) -> None:
        if self._open is not None and _recorder is not None:
            _recorder.close_span(self._open)


def step(number: int | None = None) -> None:
    """Say that a training step begins: number `number`, or one more than the last."""
    recorder = current()
    if recorder is not None:
        recorder.step(number)


def watch(loader: Iterable[_T]) -> Iterator[_T]:
    """Iterate over `loader` with every wait for its next item in a `data_wait` span."""
    iterator = iter(loader)
    while True:
        with span("data_wait"):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
