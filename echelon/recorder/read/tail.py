"""Follow a live ring: report new durations, pending operations and open spans.

A read decodes no text and examines at most the newest `MAX_NEW` operations, so it is cheap enough
to be repeated twice a second. A duration can occasionally be wrong, because its slot's checksum is
not verified. Pending operations are fully verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.recorder.format.schema import OPERATION_FIXED, Live, State
from echelon.recorder.read.reader import LiveRing
from echelon.recorder.read.ring_parser import is_payload_whole

MAX_NEW = 1024


@dataclass(frozen=True, slots=True)
class Key:
    """A call site with its group's or span's name, as references to strings in the ring."""

    name: int  # the group's, or the phase's
    site: int
    is_span: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """A pending operation or an open span."""

    key: Key
    since_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class News:
    """The changes since the last read.

    The arrays in `ended` contain durations in nanoseconds, oldest first.
    """

    ended: list[tuple[Key, npt.NDArray[np.int64]]]
    pending: list[Open]
    spans: list[Open]  # the innermost open one of each thread
    last_call_ns: dict[int, int]  # thread -> the call of its newest operation, among those examined
    is_other_ring: bool = False  # the references of earlier looks are no longer valid


class Tail:
    """A reader that follows the ring of one rank."""

    def __init__(self) -> None:
        self._file = (0, 0)
        self._next = 0  # the number of the first operation not yet examined
        self._pending = np.zeros(0, np.int64)  # numbers of those that had not ended
        self._last_span = 0  # stamp of the newest ended one
        self._last_call_ns: dict[int, int] = {}

    def read(self, ring: LiveRing) -> News:
        """Read the ring once; return the changes since the last read."""
        is_other = ring.file != self._file
        if is_other:
            self.__init__()  # type: ignore[misc]
            self._file = ring.file
        ended, pending = self._operations(ring)
        return News(
            ended + self._ended_spans(ring), pending, _innermost(ring), dict(self._last_call_ns),
            is_other,
        )  # fmt: skip

    def _operations(
        self, ring: LiveRing
    ) -> tuple[list[tuple[Key, npt.NDArray[np.int64]]], list[Open]]:
        slots = ring.operation_slots
        num = ring.words()[Live.NUM_OPERATIONS]
        first = max(self._next, num - min(MAX_NEW, len(slots)))
        numbers = np.concatenate([self._pending, np.arange(first, max(num, first), dtype=np.int64)])
        self._next = max(num, first)
        rows = slots[numbers % len(slots)]  # a copy
        stamps = numbers.astype(np.uint64) + np.uint64(1)
        fixed, state = rows["fixed"], rows["state"]
        good = (rows["head"] == stamps) & (rows["tail"] == stamps)
        good &= fixed["record"] == stamps - np.uint64(1)
        good &= rows["length"] == OPERATION_FIXED.itemsize
        own = good & (state["head"] == stamps) & (state["tail"] == stamps)
        done = own & (state["state"] == State.COMPLETED)
        waits = good & ~(own & (state["state"] >= State.COMPLETED))
        self._pending = numbers[waits][-MAX_NEW:]
        for thread in np.unique(fixed["thread"][good]).tolist():
            called = int(fixed["created_mono_ns"][good & (fixed["thread"] == thread)].max())
            self._last_call_ns[thread] = max(called, self._last_call_ns.get(thread, 0))
        lasted = state["completed_mono_ns"] - fixed["created_mono_ns"]
        done &= lasted >= 0
        ended = _by_key(fixed["group"][done], fixed["site"][done], lasted[done], is_span=False)
        pending = [
            Open(Key(int(row["group"]), int(row["site"])), int(row["created_mono_ns"]),
                 int(row["thread"]))
            for row, whole in zip(fixed[waits], _whole(rows[waits]), strict=True)
            if whole
        ]  # fmt: skip
        return ended, pending

    def _ended_spans(self, ring: LiveRing) -> list[tuple[Key, npt.NDArray[np.int64]]]:
        heads = ring.span_slots["head"]
        new = np.flatnonzero(heads > self._last_span)
        if not len(new):
            return []
        rows = ring.span_slots[new]
        rows = rows[np.argsort(rows["head"], kind="stable")]
        self._last_span = int(rows["head"][-1])
        fixed = rows["fixed"]
        lasted = fixed["ended_mono_ns"] - fixed["started_mono_ns"]
        good = (rows["head"] == rows["tail"]) & (fixed["ended_mono_ns"] > 0) & (lasted >= 0)
        return _by_key(fixed["name"][good], fixed["site"][good], lasted[good], is_span=True)


def _whole(rows: npt.NDArray[Any]) -> list[bool]:
    data, size = rows.tobytes(), rows.itemsize
    return [is_payload_whole(data, at * size) for at in range(len(rows))]


def _by_key(
    names: npt.NDArray[Any],
    sites: npt.NDArray[Any],
    lasted_ns: npt.NDArray[np.int64],
    *,
    is_span: bool,
) -> list[tuple[Key, npt.NDArray[np.int64]]]:
    both = names.astype(np.uint64) << np.uint64(32) | sites.astype(np.uint64)
    found, place = np.unique(both, return_inverse=True)
    return [
        (Key(int(one) >> 32, int(one) & 0xFFFFFFFF, is_span), lasted_ns[place == i])
        for i, one in enumerate(found.tolist())
    ]


def _innermost(ring: LiveRing) -> list[Open]:
    rows = ring.open_span_slots
    rows = rows[(rows["head"] > 0) & (rows["head"] == rows["tail"])]
    innermost: dict[int, Open] = {}
    for row in rows["fixed"][rows["fixed"]["ended_mono_ns"] == 0]:
        key = Key(int(row["name"]), int(row["site"]), is_span=True)
        one = Open(key, int(row["started_mono_ns"]), int(row["thread"]))
        if one.thread not in innermost or one.since_ns > innermost[one.thread].since_ns:
            innermost[one.thread] = one
    return list(innermost.values())
