"""Track operations that have been called but have not completed yet.

`Work` objects are polled after `Work.wait`, after `wait_tensor`, at the end of a backward pass,
before the next operation, and after an optimizer step. In addition, a thread polls four times a
second. Callbacks are not used, because they would need the GIL on the backend's thread.

Some `Work` objects, such as those of Gloo's reduce_scatter, never report completion. The operation
of such an object counts as complete when the program's wait for the object returns.

A `Work` object keeps its tensors alive, so it is dropped as soon as it is complete. At most
`_MAX_WORKS` objects are stored; the operations of older objects count as complete.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Callable
from typing import Any

import echelon.recorder.current as black_box

_PERIOD_S = 0.25
_MAX_WORKS = 256
_FEW = 8  # works end roughly in the order in which they began


# Its work; whether it is a message; and the address that it writes to, 0 if not known.
_Started = tuple[Any, bool, int]


class Pending:
    """This process's pending `Work` objects, keyed by record number.

    Args:
        wait: torch's own `Work.wait`.
    """

    def __init__(self, wait: Callable[[Any], object]) -> None:
        self.works: dict[int, _Started] = {}
        self._closing = threading.Event()
        self._wait = wait

    def add(self, record: int, work: Any, is_message: bool, address: int) -> None:
        """Add a `Work` that has just started.

        `address` is the address of the output tensor, or 0 if unknown.
        """
        self.works[record] = work, is_message, address
        if len(self.works) > _MAX_WORKS:
            self._end(next(iter(self.works)))

    def finish(self, work: Any) -> None:
        """Record that the program's wait for a `Work` has returned."""
        for record, (one, _, _) in list(self.works.items()):
            if one is work:
                self._end(record)
        if self.works:
            self.sweep_oldest()

    def finish_at(self, address: int) -> None:
        """Record that the program's wait for the tensor at an address has ended."""
        for record, (_, _, at) in list(self.works.items()):
            if address and at == address:
                self._end(record)
        if self.works:
            self.sweep_oldest()

    def _end(self, record: int) -> None:
        recorder = black_box.if_opened()
        if self.works.pop(record, None) is not None and recorder is not None:
            recorder.completed(record)

    def fail(self, work: Any, error: BaseException) -> None:
        """Record that the program's wait for a `Work` has raised an error."""
        recorder = black_box.if_opened()
        for record, (one, _, _) in list(self.works.items()):
            if one is not work or self.works.pop(record, None) is None:
                continue
            if recorder is not None:
                recorder.failed(record, error)

    def sweep(self) -> None:
        """Record the completion of all finished `Work` objects. Thread-safe; does not block."""
        self._sweep(list(self.works.items()))

    def sweep_oldest(self) -> None:
        """Record the completion of finished `Work` objects; check only the few oldest objects."""
        if self.works:
            self._sweep(list(itertools.islice(self.works.items(), _FEW)))

    def _sweep(self, works: list[tuple[int, _Started]]) -> None:
        recorder = black_box.if_opened()
        for record, (work, is_message, _) in works:
            if recorder is not None and not work.is_completed():
                continue
            # If two threads see it complete, one of them removes it.
            if self.works.pop(record, None) is None or recorder is None:
                continue
            if not is_message:  # a message cannot be waited for twice
                try:
                    self._wait(work)
                except Exception as err:  # noqa: BLE001 -- the program gets it where it waits
                    recorder.failed(record, err)
                    continue
            recorder.completed(record)

    def start(self) -> None:
        """Start the thread that polls pending `Work` objects four times a second."""
        atexit.register(self._closing.set)
        threading.Thread(target=self._watch, name="echelon-pending", daemon=True).start()

    def _watch(self) -> None:
        while not self._closing.wait(_PERIOD_S):
            try:
                self.sweep()
            except Exception:  # noqa: BLE001 -- a program trains without its record
                return
