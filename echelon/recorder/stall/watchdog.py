"""Decide whether a job has stalled.

A job has stalled if an operation has been pending for longer than the limit, or if no live rank has
recorded anything for that long. Until the world group exists, the limit for such silence is five
times as long.

A rank without a ring is observed from outside its process: its CPU use, output and network traffic
count as progress. A new dump of torch's flight recorder shows that an operation timed out on the
rank.

Each stall is reported once. The next stall is reported only after a rank has made progress. Because
the ranks' reports arrive one after another, a report of a pending operation is ignored if it was
made before this progress was observed.

A phase that is known to take longer than the limit, such as a checkpoint or an evaluation, is given
more time. During this time, only a new dump by torch counts as a stall.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

START_FACTOR = 5
_ON_ITS_WAY_NS = 1_000_000_000  # a report made before the progress that arrives after it


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """The state of one live rank.

    Stamps are monotonic times in nanoseconds. Except in `seen_mono_ns`, 0 means that there is no
    such time.
    """

    rank: int
    initialized: bool = False
    progress_mono_ns: int = 0
    pending_mono_ns: int = 0  # when the oldest operation that has not ended was called
    seen_mono_ns: int = 0  # when it was reported; 0: it was read just now
    num_ended: int = 0  # operations and spans that ended, and steps; else signs of activity
    records: bool = True  # it has a ring
    num_dumps: int = 0  # that torch's own recorder has written
    named_rank: int = -1  # the rank to name, if this stands for all recording ranks of a node
    dumped_rank: int = -1  # the rank that wrote the last dump, in the same case
    patient_until_mono_ns: int = 0  # until then its phase takes no longer than ever; 0: none

    @property
    def name(self) -> str:
        """The rank's name, as shown to the user."""
        return f"rank {self.rank if self.named_rank < 0 else self.named_rank}"


@dataclass(frozen=True, slots=True)
class Stall:
    """A detected stall: its reason and its start time."""

    reason: str
    since_mono_ns: int


class StallRule:
    """A rule that decides from successive observations whether a job has stalled."""

    def __init__(self, stall_timeout_s: float, started_mono_ns: int) -> None:
        self._limit_s = stall_timeout_s
        self._started_mono_ns = started_mono_ns
        self._reported: dict[int, int] | None = None
        self._dumps: dict[int, int] = {}
        self._trusted_from_ns = 0  # reports from before are outdated
        self._quiet_until_ns = 0

    @property
    def is_stalled(self) -> bool:
        """True while the last reported stall continues."""
        return self._reported is not None

    def begin_again(self, now_mono_ns: int) -> None:
        """Mark the reported stall as over; report no new stall until the timeout elapses again."""
        self._reported = None
        self._quiet_until_ns = now_mono_ns + int(self._limit_s * 1e9)

    def look(self, sights: Sequence[Sight], now_mono_ns: int) -> Stall | None:
        """Return a stall that has not been reported yet; None if there is none."""
        if not sights or now_mono_ns < self._quiet_until_ns:
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
        # Once one rank records, all should: then output and processor use of the others are not
        # progress.
        telling = [sight for sight in sights if sight.records] or sights
        started = any(sight.initialized for sight in sights)
        limit_s = self._limit_s if started else self._limit_s * START_FACTOR
        latest = max([self._started_mono_ns, *(sight.progress_mono_ns for sight in telling)])
        if now - latest < limit_s * 1e9:
            return None
        what = "no rank recorded anything" if started else "no rank reached init"
        if started and not telling[0].records:
            what = "no rank computed, printed or sent anything"
        return Stall(f"{what} for {limit_s:g} s", latest)


def _over_if_more(sights: Sequence[Sight]) -> dict[int, int]:
    """Return, for each rank, the event count that the rank must exceed to end the stall."""
    waiting = {sight.rank for sight in sights if sight.pending_mono_ns and not sight.records}
    return {
        sight.rank: sys.maxsize if waiting and sight.rank not in waiting else sight.num_ended
        for sight in sights
    }
