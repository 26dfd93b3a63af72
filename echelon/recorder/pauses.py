"""Pauses of the garbage collector, recorded by themselves.

Every collection counts into the live words; one that takes a millisecond or more is kept as a span
`gc` of the thread that it stopped. It is no progress: a rank that only collects garbage is stuck.

The callback may run between any two instructions of any thread, also inside the recorder: so it
takes no lock, and all its texts are stored beforehand.
"""

from __future__ import annotations

import gc
from time import monotonic_ns
from typing import Any

from echelon.recorder.recorder import Recorder

KEPT_FROM_NS = 1_000_000
_NUM_GENERATIONS = 3


class GarbagePauses:
    """Records collections from `start` to `stop`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name = recorder.text("gc")
        self._details = [recorder.text(f"generation {n}") for n in range(_NUM_GENERATIONS)]
        self._began_ns = 0

    def start(self) -> None:
        """Listen to the collector."""
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Listen no more. Safe to call twice."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = monotonic_ns()
        if phase == "start":
            self._began_ns = now
            return
        began, self._began_ns = self._began_ns, 0
        if began:
            detail = self._details[min(info["generation"], _NUM_GENERATIONS - 1)]
            self._recorder.note_pause(self._name, detail, began, now, now - began >= KEPT_FROM_NS)
