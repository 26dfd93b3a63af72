"""Use the optional C core to write operations and spans."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from echelon.recorder.format.layout import OPEN_SPANS_OFFSET
from echelon.recorder.format.schema import NUM_KEPT
from echelon.recorder.write import sites
from echelon.recorder.write.operations.operations import OperationWriter
from echelon.recorder.write.operations.signatures import Signatures
from echelon.recorder.write.ring.ring import Ring
from echelon.recorder.write.spans import SpanWriter

try:
    _native: Any = importlib.import_module("echelon.recorder._native")
except ImportError:
    _native = None


def available() -> bool:
    """Return whether the C core was built."""
    return _native is not None


class NativeWriter(OperationWriter, SpanWriter, Protocol):
    """The interface of the C core's writer."""

    def on_collection(self, phase: str, info: dict[str, Any], /) -> None:
        """Count a garbage-collection pause. The method is a callback for `gc.callbacks`."""

    def keep_pauses(self, keep: Callable[[int, int, dict[str, Any]], None], from_ns: int) -> None:
        """Register `keep(began, ended, info)` to be called after each pause of at least `from_ns`.

        A pause is one garbage collection; the times are in nanoseconds.
        """

    def start_heartbeat(self, period_ns: int, /) -> bool:
        """Start a native heartbeat thread; return whether it started."""

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat thread. Repeated calls are safe."""

    def write_faults(self, over_others: bool, /) -> None:
        """Install handlers that record a fatal signal before this process dies."""


def make_writer(
    ring: Ring, known_sites: sites.Sites, now: Callable[[], int] | None = None
) -> NativeWriter:
    """Return the C core's writer, which references the ring's memory until the ring is closed."""
    signatures = Signatures(ring)
    writer = _native.Writer(
        memory=ring.map,
        operations_offset=ring.layout.operations_offset,
        num_operations=ring.num_operations,
        spans_offset=ring.layout.spans_offset,
        num_spans=ring.num_spans,
        open_spans_offset=OPEN_SPANS_OFFSET,
        kept_offset=ring.layout.kept_offset,
        num_kept=NUM_KEPT,
        recent_offset=ring.layout.recent_offset,
        add_signature=signatures.add,
        is_user_code=sites.is_user_code,
        add_site=known_sites.add,
        find_site=known_sites.find,
        names=ring.texts.names,
        recent=ring.texts.recents,
        add_name=ring.texts.span_name,
        add_detail=ring.texts.span_detail,
        now=now,
    )
    ring.when_closed(writer.close)
    made: NativeWriter = writer
    return made
