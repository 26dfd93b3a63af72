"""Record operations, spans, steps, a heartbeat and last words in a ring.

The recorder never raises an exception into the training code and never accesses a device.
`current.py` decides which process has a recorder.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Any, TypeVar, cast

from echelon.recorder.clock import NOT_MEASURED, HostClocks, HostTime
from echelon.recorder.format.schema import Identity, LastWords, Live, encode_ranks
from echelon.recorder.spent import spent
from echelon.recorder.write import native, sites
from echelon.recorder.write.counting import counter
from echelon.recorder.write.operations.operations import NOT_RECORDED as NOT_RECORDED
from echelon.recorder.write.operations.operations import OperationWriter, make_operations
from echelon.recorder.write.ring.ring import Ring
from echelon.recorder.write.ring.texts import text_of
from echelon.recorder.write.spans import Spans, SpanWriter

HEARTBEAT_S = 0.5
# Looking up a member of an enum costs as much as storing it.
_STEP = int(Live.STEP)
_STEP_MONO_NS = int(Live.STEP_MONO_NS)
_PROGRESS = int(Live.PROGRESS_MONO_NS)
_FIRST_STEP = int(Live.FIRST_STEP)
_WAITED, _CHECKPOINT, _DATA = int(Live.WAITED_NS), int(Live.CHECKPOINT_NS), int(Live.DATA_NS)
_MAX_STEP = (1 << 63) - 2
_ERROR_CHARS = 600
_WORDS_CHARS = 2000
_TRACE_CHARS = 6000
_BASES = 16
_THREAD_CHARS = 100


_Call = TypeVar("_Call", bound=Callable[..., Any])


def _never_raises(answer: Any) -> Callable[[_Call], _Call]:
    """Return a decorator that makes a method return `answer` instead of raising an exception."""

    def wrap(method: _Call) -> _Call:
        @functools.wraps(method)
        def guarded(*args: Any, **changes: Any) -> Any:
            try:
                return method(*args, **changes)
            except Exception:  # noqa: BLE001 -- see above
                return answer

        return cast("_Call", guarded)

    return wrap


class Recorder:
    """A recorder that writes into a ring. All methods are thread-safe and never raise."""

    def __init__(
        self, ring: Ring, *, in_c: bool = True, now: Callable[[], int] | None = None
    ) -> None:
        """Start recording into `ring`.

        Args:
            in_c: True to use the C core if it was built.
            now: the clock, which returns nanoseconds; None means the monotonic clock.
        """
        self._ring = ring
        self._live = ring.live
        self._coalesced_numbers = counter()
        self._sites = sites.Sites(ring.texts)
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._now = now or monotonic_ns
        self._beating: threading.Thread | None = None
        self._is_owner = True
        self._has_words = False
        self._spent_before = (0, 0, 0)
        self._stepping_thread = 0
        self._identifying = threading.RLock()
        self._clocks = HostClocks(ring.identity.mono_ns, ring.identity.wall_ns)
        self._after_steps: tuple[int, Callable[[], None]] | None = None
        self.closing = threading.Event()
        self.is_in_c = in_c and native.available()
        self.native: native.NativeWriter | None = None
        operations: OperationWriter
        spans: SpanWriter
        if self.is_in_c:
            operations = spans = self.native = native.make_writer(ring, self._sites, now)
        else:
            operations = make_operations(ring, self._sites, self._now)
            spans = Spans(ring, self._sites, self._now)
        # No method call stands between a record and its writer: it would cost as much as the
        # record.
        self.begin = operations.begin
        self.prepare = operations.prepare
        self.begin_prepared = operations.begin_prepared
        self.started = operations.started
        self.completed = operations.completed
        self._failed = operations.failed
        self.open_span = spans.open_span
        self.close_span = spans.close_span
        self.keep_span = spans.keep_span

    @property
    def identity(self) -> Identity:
        """The identity of the black box's writer."""
        return self._ring.identity

    def num_records(self) -> int:
        """Return the number of operations and spans recorded so far."""
        return self._live[Live.NUM_OPERATIONS] + self._live[Live.NUM_SPANS]

    @_never_raises(None)
    def identify(self, **changes: Any) -> None:
        """Replace some fields of the identity, such as the world size or the clock offset."""
        with self._identifying:
            self._ring.write_identity(self._ring.identity.changed(**changes))

    @_never_raises(None)
    def look_at_clocks(self, now: HostTime | None) -> None:
        """Update the ring's identity if the wall clock was adjusted or the host was suspended.

        Args:
            now: current readings of the host's clocks. If None, the method does nothing.
        """
        if now is None:
            return
        has_moved, was_suspended = self._clocks.look(now)
        with self._identifying:
            if was_suspended and self.identity.clock_error_ns > 0:  # 0: rank 0's clock, too
                self.identify(clock_error_ns=NOT_MEASURED)
            if has_moved:
                self.identify(mono_ns=now.mono_ns, wall_ns=now.wall_ns)

    def mark_initialized(self) -> None:
        """Record that the world group exists."""
        self._live[Live.INITIALIZED] = 1
        self._live[Live.PROGRESS_MONO_NS] = monotonic_ns()

    @_never_raises(0)
    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Return a reference to a process group, to be passed to `begin`."""
        key = (name, tuple(ranks))
        known = self._groups.get(key)
        if known is None:
            known = self._ring.texts.intern_group(f"{name}\n{encode_ranks(ranks)}")
            self._groups[key] = known
        return known

    @_never_raises(None)
    def failed(self, record: int, error: BaseException) -> None:
        """Record that an operation failed with an error."""
        text = f"{type(error).__name__}: {text_of(error)}"[:_ERROR_CHARS]
        self._failed(record, self._ring.texts.recent(text))

    @_never_raises(0)
    def new_group(self, name: str, ranks: Sequence[int]) -> int:
        """Return a reference to a process group that has just been created.

        If a group with the same name and members already exists, a number is appended to the name.
        All members append the same number.
        """
        key, number = (name, tuple(ranks)), 1
        while key in self._groups:
            number += 1
            key = (f"{name}#{number}", tuple(ranks))
        return self.group(*key)

    def next_coalesced(self) -> int:
        """Return the number of a new block of coalesced operations."""
        return self._coalesced_numbers()

    @property
    def step_number(self) -> int:
        """The number of the current training step; -1 before the first step."""
        return int(self._live[_STEP]) - 1

    def step(self, number: int | None = None, *, begins: bool = True) -> None:
        """Record the start of training step `number`, by default the next step.

        Args:
            begins: True if the step begins now; False if it began at an unknown earlier time.
        """
        try:
            now, live = self._now(), self._live
            before = live[_STEP]
            word = before + 1 if number is None else _step_word(number, before)
            if self._after_steps is not None:
                self._call_if_due(word)
            live[_STEP] = word
            self._ring.step = word - 1
            live[_STEP_MONO_NS] = live[_PROGRESS] = now
            if begins:
                self._note_spent(now)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def call_after_steps(self, num_steps: int, action: Callable[[], None]) -> None:
        """Call `action` once on the training thread, just before a step's end is recorded.

        Args:
            num_steps: the step at whose end `action` is called, counted from the first recorded
                step, which is 1.
        """
        self._after_steps = (num_steps, action)

    def _call_if_due(self, word: int) -> None:
        first = self._live[_FIRST_STEP]
        if self._after_steps is None or not first or word - first < self._after_steps[0]:
            return
        _, action = self._after_steps
        self._after_steps = None
        action()

    def _note_spent(self, now: int) -> None:
        """Write the training thread's collective, checkpoint and data-wait times to the live words.

        If another thread calls the method, these times are left unchanged.
        """
        live, known = self._live, spent.spans_ns
        waited = int(spent.collectives_s * 1e9)
        saving, data = known.get("checkpoint", 0), known.get("data_wait", 0)
        if not live[_FIRST_STEP]:
            self._spent_before = (waited, saving, data)
            live[Live.FIRST_STEP_MONO_NS] = now
            live[_FIRST_STEP] = live[_STEP]
            self._stepping_thread = threading.get_ident()
        before = self._spent_before
        if threading.get_ident() == self._stepping_thread:  # each thread has its own totals
            live[_WAITED] = max(0, waited - before[0])
            live[_CHECKPOINT] = max(0, saving - before[1])
            live[_DATA] = max(0, data - before[2])

    @_never_raises(None)
    def note_checkpoint(self, detail: str) -> None:
        """Record that a checkpoint was saved or loaded. The first word of `detail` states which."""
        what = detail.removeprefix("torch.")
        if what.startswith("load"):
            self._live[Live.NUM_LOADS] += 1
        elif what.startswith(("save", "async_save")):
            self._live[Live.SAVED_STEP] = self._live[_STEP]

    def text(self, text: str) -> int:
        """Store a string, and return a reference to it that can be passed to `keep_span`."""
        return self._ring.texts.intern(text)

    def count_pauses(self, number: int, nanoseconds: int) -> None:
        """Store the number of garbage collections so far and their total duration."""
        self._live[Live.NUM_GC_PAUSES] = number
        self._live[Live.GC_PAUSES_NS] = nanoseconds

    @_never_raises(None)
    def last_words(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        *,
        thread: str = "",
    ) -> None:
        """Record the exception that ends this process or one of its threads.

        Args:
            thread: the name of the thread that ends; "" means the whole process. If several threads
                fail, only the first exception is stored. An exception that ends the process
                replaces a thread's exception.
        """
        if not self._is_owner or (thread and self._has_words):
            return
        self._has_words = True
        frames = list(traceback.walk_tb(trace))
        own = [pair for pair in frames if sites.is_user_code(pair[0].f_code)] or frames
        site = ""
        if own:
            frame, line = own[-1]
            site = f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        words = LastWords(
            type=f"{kind.__module__}.{kind.__qualname__}",
            message=text_of(error)[:_WORDS_CHARS],
            site=site,
            traceback="".join(traceback.format_exception(kind, error, trace))[-_TRACE_CHARS:],
            mono_ns=monotonic_ns(),
            thread=thread[:_THREAD_CHARS],
            bases=tuple(f"{b.__module__}.{b.__qualname__}" for b in kind.__mro__[1:-1][:_BASES]),
        )
        self._ring.write_last_words(words)

    def start_heartbeat(self) -> None:
        """Start the Python heartbeat thread and, if the C core is in use, the native thread."""
        if self.native is not None:
            self.native.start_heartbeat(int(HEARTBEAT_S * 1e9))
        self._live[Live.HEARTBEAT_MONO_NS] = monotonic_ns()
        beating = threading.Thread(target=self._beat, name="echelon-heartbeat", daemon=True)
        beating.start()
        self._beating = beating

    def close(self) -> None:
        """Record a clean exit and stop the heartbeat. The ring's file is not deleted."""
        self.closing.set()
        if self._beating is not None:
            self._beating.join(timeout=2 * HEARTBEAT_S)
        if self.native is not None:
            self.native.stop_heartbeat()
        if self._is_owner and self._live[_FIRST_STEP]:
            self._note_spent(0)
        self._live[Live.CLOSED] = 1

    def disown(self) -> None:
        """In a forked child, stop writing last words and time totals to the parent's ring."""
        self._is_owner = False

    def _beat(self) -> None:
        while not self.closing.wait(HEARTBEAT_S):
            self._live[Live.HEARTBEAT_MONO_NS] = monotonic_ns()
            self.look_at_clocks(HostTime.read())


def _step_word(number: Any, before: int) -> int:
    """Return the live word that stores a step: its number, clamped to the valid range, plus one.

    If `number` cannot be converted to an integer, return `before`.
    """
    try:
        return min(max(int(number), -1), _MAX_STEP) + 1
    except (TypeError, ValueError, OverflowError):
        return before
