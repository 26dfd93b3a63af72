"""Record the pauses of the garbage collector separately from other spans.

Every collection is counted in the live words. A collection that takes at least a millisecond is
also recorded as a `gc` span. Collections do not count as progress.

The garbage collector can call this module's callback on any thread, even inside the recorder. The
callback therefore takes no lock and stores no new strings. The C core has its own callback, because
some programs collect garbage hundreds of times per second.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from echelon.recorder.write.recorder import Recorder

KEPT_FROM_NS = 1_000_000
_NUM_GENERATIONS = 3


class GarbagePauses:
    """A recorder of garbage collections, active from `start` to `stop`."""

    def __init__(self, recorder: Recorder, kept_from_ns: int = KEPT_FROM_NS) -> None:
        self._recorder = recorder
        self._kept_from_ns = kept_from_ns
        self._name = recorder.text("gc")
        self._details = [recorder.text(f"generation {n}") for n in range(_NUM_GENERATIONS)]
        self._began_ns = self._total_ns = self._number = 0
        self._callback: Callable[[str, dict[str, Any]], None] = self._on_collection
        if recorder.native is not None:
            recorder.native.keep_pauses(self._keep, kept_from_ns)
            self._callback = recorder.native.on_collection

    def start(self) -> None:
        """Register the callback with the garbage collector."""
        gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Unregister the callback from the garbage collector. Repeated calls are safe."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = monotonic_ns()
        if phase == "start":
            self._began_ns = now
            return
        began, self._began_ns = self._began_ns, 0
        if began:
            self._number += 1
            self._total_ns += now - began
            self._recorder.count_pauses(self._number, self._total_ns)
            if now - began >= self._kept_from_ns:
                self._keep(began, now, info)

    def _keep(self, began: int, ended: int, info: dict[str, Any]) -> None:
        detail = self._details[min(info["generation"], _NUM_GENERATIONS - 1)]
        self._recorder.keep_span(self._name, detail, began, ended)
