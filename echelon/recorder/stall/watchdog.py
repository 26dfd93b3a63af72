"""When a job counts as stalled: a pure rule over what the rings show from outside.

A job is stalled once an operation has been pending longer than the limit on a living rank, or once
no living rank has recorded an operation, span or step for that long. Before the world group stands,
loading libraries and data may take its time: five times the limit.

A rank that records nothing is seen from outside: what it uses, prints and sends is its progress,
and it has passed init once it has met the others at the store. A flight recorder dump that torch
writes of itself says that an operation has timed out there.

One stall is reported once. The next one counts only after progress: the number of ended operations,
spans and steps of some rank must have moved. Ranks that report do so one after the other: what one
said was pending before another one's progress was seen has probably ended with it, and counts again
only in its next report.

What has taken longer than the limit before and succeeded (a checkpoint, an evaluation) gets more
time where the caller knows of it: until then, nothing counts as a stall but torch's own dumps.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

START_FACTOR = 5
_ON_ITS_WAY_NS = 1_000_000_000  # a report that was made before the progress, and arrives after it


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What one living rank shows; all stamps are monotonic ns, 0: none."""

    rank: int
    initialised: bool = False
    progress_mono_ns: int = 0
    pending_mono_ns: int = 0  # when the oldest operation that has not ended was called
    seen_mono_ns: int = 0  # when it was reported; 0: it was read just now
    num_ended: int = 0  # operations and spans that ended, and steps; else signs of activity
    records: bool = True  # it has a ring
    num_dumps: int = 0  # that torch's own recorder has written
    named_rank: int = -1  # the rank to name, where this stands for all recording ranks of a node
    dumped_rank: int = -1  # the rank that wrote the last dump, in the same case
    patient_until_mono_ns: int = 0  # what it does has taken that long before; 0: no longer than any

    @property
    def name(self) -> str:
        """The rank that a reason names."""
        return f"rank {self.rank if self.named_rank < 0 else self.named_rank}"


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall was seen: why, and since when."""

    reason: str
    since_mono_ns: int


class StallRule:
    """Decide from one look at the ranks to the next. Reads no clock: `now` is handed in."""

    def __init__(self, stall_timeout_s: float, started_mono_ns: int) -> None:
        self._limit_s = stall_timeout_s
        self._started_mono_ns = started_mono_ns
        self._reported: dict[int, int] | None = None
        self._dumps: dict[int, int] = {}
        self._trusted_from_ns = 0  # what was reported earlier may have ended with the last stall

    @property
    def is_stalled(self) -> bool:
        """Whether a reported stall still lasts."""
        return self._reported is not None

    def look(self, sights: Sequence[Sight], now_mono_ns: int) -> Stall | None:
        """Return a stall that was not reported yet."""
        if not sights:
            return None
        ended = {sight.rank: sight.num_ended for sight in sights}
        dumped = self._dumped(sights, now_mono_ns)
        if self._reported is not None:
            if all(ended[rank] <= self._reported.get(rank, -1) for rank in ended):
                return None
            self._reported = None
            self._trusted_from_ns = now_mono_ns + _ON_ITS_WAY_NS
        stall = dumped
        if not any(now_mono_ns < sight.patient_until_mono_ns for sight in sights):
            stall = stall or self._pending(sights, now_mono_ns) or self._silent(sights, now_mono_ns)
        if stall is not None:
            self._reported = _over_if_more(sights)
        return stall

    def _dumped(self, sights: Sequence[Sight], now: int) -> Stall | None:
        new = [sight for sight in sights if sight.num_dumps > self._dumps.get(sight.rank, 0)]
        self._dumps.update({sight.rank: sight.num_dumps for sight in new})
        if not new:
            return None
        first = new[0]
        name = first.name if first.dumped_rank < 0 else f"rank {first.dumped_rank}"
        return Stall(f"{name} wrote a dump of torch's flight recorder", now)

    def _pending(self, sights: Sequence[Sight], now: int) -> Stall | None:
        waiting = [
            sight
            for sight in sights
            if sight.pending_mono_ns
            and (not sight.seen_mono_ns or sight.seen_mono_ns >= self._trusted_from_ns)
        ]
        if not waiting:
            return None
        first = min(waiting, key=lambda sight: sight.pending_mono_ns)
        if now - first.pending_mono_ns < self._limit_s * 1e9:
            return None
        return Stall(
            f"{first.name} has an operation pending for {self._limit_s:g} s",
            first.pending_mono_ns,
        )

    def _silent(self, sights: Sequence[Sight], now: int) -> Stall | None:
        # Once one rank records, all are to: what the others use or print is then no progress.
        telling = [sight for sight in sights if sight.records] or sights
        started = any(sight.initialised for sight in sights)
        limit_s = self._limit_s if started else self._limit_s * START_FACTOR
        latest = max([self._started_mono_ns, *(sight.progress_mono_ns for sight in telling)])
        if now - latest < limit_s * 1e9:
            return None
        what = "no rank recorded anything" if started else "no rank reached init"
        if started and not telling[0].records:
            what = "no rank computed, printed or sent anything"
        return Stall(f"{what} for {limit_s:g} s", latest)


def _over_if_more(sights: Sequence[Sight]) -> dict[int, int]:
    """Return, for each rank, the number above which a stall that was just seen is over.

    Where ranks without a ring wait in an operation, what the others do ends no wait.
    """
    waiting = {sight.rank for sight in sights if sight.pending_mono_ns and not sight.records}
    return {
        sight.rank: sys.maxsize if waiting and sight.rank not in waiting else sight.num_ended
        for sight in sights
    }
