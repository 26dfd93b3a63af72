"""Let a program mark its phases, its steps and its waits for data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic_ns
from typing import Any, TypeVar

from echelon.recorder.current import current, if_opened
from echelon.recorder.spent import MAX_NAMES, spent

_T = TypeVar("_T")

by_hand: set[str] = set()  # spans, and "step", that the program marks itself: hooks do not


class span:  # noqa: N801 -- reads as a statement: `with span("data_wait"):`
    """Mark a phase of the step: `with span("data_wait"): batch = next(batches)`.

    The analysis interprets the names data_wait, compute, checkpoint, compile and store. Any other
    name is allowed.

    Example:
        >>> batches = iter([1, 2, 3])
        >>> with recorder.span("data_wait"):
        ...     batch = next(batches)
        >>> with recorder.span("evaluate", "epoch 3"):
        ...     pass
    """

    __slots__ = ("_before_ns", "_began_ns", "_detail", "_name", "_open", "_totals")

    def __init__(self, name: str, detail: str = "") -> None:
        self._name = name
        self._detail = detail
        self._open: Any = None
        self._totals: dict[str, int] = {}
        self._before_ns = self._began_ns = 0
        by_hand.add(name)

    def __enter__(self) -> None:
        self._totals = spent.spans_ns
        self._before_ns = self._totals.get(self._name, 0)
        self._began_ns = monotonic_ns()
        recorder = current()
        if recorder is not None:
            self._open = recorder.open_span(self._name, self._detail, 2)

    def __exit__(self, error: object, *_: object) -> None:
        # Not a sum: a span of the same name inside this one has ended, and is part of it.
        if self._name in self._totals or len(self._totals) < MAX_NAMES:
            self._totals[self._name] = self._before_ns + monotonic_ns() - self._began_ns
        recorder = if_opened()  # none in a forked child: the span's end belongs to the parent
        if self._open is not None and recorder is not None:
            recorder.close_span(self._open)
            if self._name == "checkpoint" and error is None:
                recorder.note_checkpoint(self._detail)


def step(number: int | None = None) -> None:
    """Mark the start of training step `number`, by default the next step.

    Example:
        >>> for batch in range(3):
        ...     recorder.step()
        >>> recorder.step(100)  # after a resume
    """
    recorder = current()
    if recorder is not None:
        by_hand.add("step")
        recorder.step(number)


def watch(loader: Iterable[_T]) -> Iterator[_T]:
    """Iterate over `loader`, recording each wait for the next item as a `data_wait` span.

    Example:
        >>> for batch in recorder.watch(["first", "second"]):
        ...     recorder.step()
    """
    iterator = iter(loader)
    while True:
        with span("data_wait"):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
