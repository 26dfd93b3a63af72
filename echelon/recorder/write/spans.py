"""Write spans in Python if the C core was not built."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from echelon.recorder.format.schema import NUM_OPEN_SPANS, Live
from echelon.recorder.write.counting import counter
from echelon.recorder.write.ring.ring import SPAN_FIXED_STRUCT, Ring
from echelon.recorder.write.sites import Sites

# Looking up a member of an enum costs as much as storing it.
_STEP = int(Live.STEP)
_PROGRESS = int(Live.PROGRESS_MONO_NS)
_NUM_SPANS = int(Live.NUM_SPANS)


class SpanWriter(Protocol):
    """The common interface of `Spans` and the C core's `Writer`."""

    def open_span(self, name: str, detail: str, depth: int, /) -> Any:
        """Record the start of a phase.

        Args:
            depth: the number of frames to skip in the search for user code; 1 means to start at the
                caller.

        Returns:
            The argument to pass to `close_span`; None if the span cannot be recorded.
        """

    def close_span(self, span: Any, /) -> None:
        """Record the end of a phase."""

    def keep_span(self, name: int, detail: int, began: int, ended: int, /) -> None:
        """Record a phase that has already ended, given references to strings in the ring.

        The phase does not count as progress. The method takes no lock and stores no strings.
        """


class _Thread(threading.local):
    """The calling thread's native id and number of open spans."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.depth = 0  # of its open spans


class OpenSpan:
    """A span and its slot among the open spans; the slot is -1 if all slots were taken."""

    __slots__ = (
        "depth", "detail", "is_closed", "name", "number", "place", "site", "started", "step",
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
        self.is_closed = False

    def pack(self, ended: int) -> bytes:
        """Return the span's packed record; `ended` is a stamp, or 0 while the span is open."""
        return SPAN_FIXED_STRUCT.pack(
            self.number, self.started, ended, self.step, self.name, self.detail, self.site,
            self.thread, self.depth, 0,
        )  # fmt: skip


class Spans:
    """The pure-Python writer of spans. Its methods are thread-safe and never raise."""

    def __init__(
        self, ring: Ring, sites: Sites, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._ring = ring
        self._live = ring.live
        self._sites = sites
        self._now = now
        self._numbers = counter()
        self._records = counter()
        self._num_ended = counter(1)
        self._places = deque(range(NUM_OPEN_SPANS))
        self._thread = _Thread()

    def open_span(self, name: str, detail: str, depth: int, /) -> OpenSpan | None:
        """Record the start of a phase; see `SpanWriter`."""
        try:
            return self._open(name, detail, depth + 1)
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return None

    def _open(self, name: str, detail: str, depth: int) -> OpenSpan:
        now = self._now()
        texts = self._ring.texts
        name_ref = texts.span_name(name)
        detail_ref = texts.span_detail(detail)
        try:
            site, _ = self._sites.find(sys._getframe(depth))
        except ValueError:  # the stack is not that deep
            site = 0
        step = self._live[_STEP] - 1
        thread = self._thread
        level = thread.depth
        thread.depth = level + 1
        try:
            place = self._places.popleft()
        except IndexError:
            place = -1
            self._live[Live.OPEN_SPANS_REFUSED] += 1
        span = OpenSpan(
            self._numbers(), now, step, name_ref, detail_ref, site, thread.native_id, level, place
        )
        if place >= 0:
            self._ring.write_open_span(place, span.number, span.pack(0))
        self._live[_PROGRESS] = now
        return span

    def close_span(self, span: OpenSpan, /) -> None:
        """Record the end of a phase. Closing the same span again has no effect."""
        try:
            if not span.is_closed:
                span.is_closed = True  # its place may belong to another span from now on
                self._close(span, self._now())
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return

    def _close(self, span: OpenSpan, now: int) -> None:
        thread = self._thread
        if span.thread == thread.native_id:
            thread.depth = span.depth
        fields = span.pack(now)
        self._ring.write_span(self._records(), fields)
        if span.place >= 0:
            self._ring.write_open_span(span.place, span.number, fields)
            self._places.append(span.place)
        self._live[_NUM_SPANS] = self._num_ended()
        self._live[_PROGRESS] = now

    def keep_span(self, name: int, detail: int, began: int, ended: int, /) -> None:
        """Record a phase that has already ended; see `SpanWriter`."""
        try:
            thread = self._thread
            span = OpenSpan(
                self._numbers(), began, self._live[_STEP] - 1, name, detail, 0,
                thread.native_id, thread.depth, -1,
            )  # fmt: skip
            self._ring.write_span(self._records(), span.pack(ended))
        except Exception:  # noqa: BLE001 -- recording never raises into training
            return
