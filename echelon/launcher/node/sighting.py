"""Report the state of this node's live ranks, for stall detection.

Ranks with rings are combined into one row, so that the coordinator's work grows only with the
number of nodes. Each rank that records nothing is examined from outside its process, and has its
own row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from echelon.errors import DumpFormatError
from echelon.launcher.control import messages as m
from echelon.launcher.control.lived import LivedTime
from echelon.launcher.incident.worker import Worker
from echelon.launcher.limits.node import NodeLimits, Row, Summary
from echelon.launcher.node.activity import Activity
from echelon.recorder.read import LiveRing
from echelon.recorder.stall.watchdog import Sight

_STEP_S = 2.0  # between two looks; a longer gap counts as this process's own standstill


class Sighting:
    """The state of one attempt's workers on this node.

    Reported ages do not include time during which this process was not running.

    Args:
        start: the command that started the attempt.
        workers: the workers to examine.
        num_printed: a function that returns how many bytes a rank has printed.
    """

    def __init__(
        self,
        start: m.Start,
        workers: Sequence[Worker],
        num_printed: Callable[[int], int],
    ) -> None:
        self._attempt = start.attempt
        self._store_port = start.master_port
        self._quiet_s = start.stall_timeout_ms / 2e3
        self._workers = workers
        self._num_printed = num_printed
        self._rings: dict[int, LiveRing] = {}
        self._activities: dict[int, Activity] = {}  # of ranks without a ring, and of hooked ranks
        self._starting: dict[int, Activity] = {}  # of ranks that record but have not initialized
        self._num_signs: dict[int, int] = {}
        self._num_dumps: dict[int, int] = {}
        self._dumped_rank = -1  # the recording rank whose dump appeared last
        self._num_moves = 0
        self._lived = LivedTime(_STEP_S, time.monotonic_ns() / 1e9)
        self._limits: NodeLimits | None = None
        if start.learns_limits:
            fixed_s = start.stall_timeout_ms / 1e3
            self._limits = NodeLimits(start.master_port, fixed_s, num_printed)
        self._reports = Reports(start.sights_ms / 1e3, start.stall_timeout_ms)

    def report(self, *, at_once: bool = False) -> m.Sights | None:
        """Examine the ranks; return a report, or None if no report is due."""
        sights = self.look()
        if sights is None or not self._reports.is_due(sights, time.monotonic(), at_once=at_once):
            return None
        return sights

    def look(self) -> m.Sights | None:
        """Examine the live ranks and return a report, or None if no rank is alive."""
        now = time.monotonic_ns()
        self._lived.tick(now / 1e9)
        sights: list[Sight] = []
        rows, own = [], {}
        for worker in self._workers:
            if not worker.alive:
                continue
            own_dumps = _dumps_of(worker)
            ring = self._ring(worker)
            if ring is None or ring.is_closed:
                rows.append([worker.rank, *self._from_outside(worker, now), own_dumps])
            else:
                if not ring.is_hooked:  # if it is hooked again, its activity counts from then on
                    self._activities.pop(worker.rank, None)
                sights.append(self._sight(ring, worker, now))
                own[worker.rank] = own_dumps
        if not sights and not rows:
            return None
        self._note_dumps(own)
        said = self._sum_up(sights, now)
        return m.Sights(
            attempt=self._attempt,
            folded=self._fold(sights, now, sum(own.values())),
            ranks=rows,
            dumped_rank=self._dumped_rank,
            **asdict(said),
        )

    def _sum_up(self, sights: list[Sight], now: int) -> Summary:
        if self._limits is None:
            return Summary()
        return self._limits.sum_up(sights, lambda then: self._age_s(now, then))

    def watched(self) -> list[Row]:
        """Return the limits learned for this node's call sites and phases.

        The call sites and phases that ran most often come first.
        """
        return [] if self._limits is None else self._limits.rows()

    def _note_dumps(self, own: dict[int, int]) -> None:
        """If any ranks have new dumps, record the lowest of these ranks."""
        new = [rank for rank, num in own.items() if num > self._num_dumps.get(rank, 0)]
        if new:
            self._dumped_rank = min(new)
        self._num_dumps.update(own)

    def words(self, worker: Worker) -> tuple[int, ...] | None:
        """Return the live values in a rank's ring (see `Live`); None while the rank has no ring."""
        ring = self._ring(worker)
        return None if ring is None else ring.words()

    def rest(self) -> None:
        """Ignore the activity that the collection of an incident has caused in the ranks."""
        for rank, activity in self._activities.items():
            activity.rest(self._num_printed(rank), time.monotonic_ns())
        if self._limits is not None:
            self._limits.rest(time.monotonic_ns())

    def forget(self, rank: int) -> None:
        """Discard a lost rank's state before another process takes the rank's place."""
        ring = self._rings.pop(rank, None)
        if ring is not None:
            ring.close()
        for known in (self._activities, self._starting, self._num_signs, self._num_dumps):
            known.pop(rank, None)
        if self._limits is not None:
            self._limits.forget(rank)

    def close(self) -> None:
        """Unmap the rings."""
        while self._rings:
            self._rings.popitem()[1].close()

    def _ring(self, worker: Worker) -> LiveRing | None:
        ring = self._rings.get(worker.rank)
        if ring is None:
            try:
                ring = self._rings[worker.rank] = LiveRing(worker.folder / "ring")
            except DumpFormatError:
                return None
        return ring

    def _fold(self, sights: Sequence[Sight], now: int, dumps: int) -> list[int]:
        if not sights:
            return []
        for sight in sights:
            before = self._num_signs.get(sight.rank, 0)
            self._num_moves += max(0, sight.num_ended - before)
            self._num_signs[sight.rank] = sight.num_ended
        waiting = [sight for sight in sights if sight.pending_mono_ns]
        oldest = min(waiting, key=lambda sight: sight.pending_mono_ns, default=None)
        return [
            self._workers[0].rank,
            int(any(sight.initialized for sight in sights)),
            self._age_ms(now, max(sight.progress_mono_ns for sight in sights)),
            -1 if oldest is None else self._age_ms(now, oldest.pending_mono_ns),
            -1 if oldest is None else oldest.rank,
            self._num_moves,
            dumps,
        ]

    def _sight(self, ring: LiveRing, worker: Worker, now: int) -> Sight:
        """Examine a rank that has a ring.

        The rank's process is also examined if the rank's phases are recorded by hooks rather than
        by calls in the program, or if the rank's world group does not exist yet.
        """
        sight = ring.sight(worker.rank)
        if ring.is_hooked:
            activity = self._active(worker, now)
            last_ns = max(sight.progress_mono_ns, activity.last_mono_ns)
            activity.last_mono_ns = last_ns  # the rank's age once it closes its ring
            sight = replace(sight, progress_mono_ns=last_ns)
        elif not sight.initialized:
            starved_ns = self._look_from_outside(self._starting, worker, now).starved_mono_ns
            sight = replace(sight, progress_mono_ns=max(sight.progress_mono_ns, starved_ns))
        else:
            self._starting.pop(worker.rank, None)
        if self._limits is not None:
            self._limits.see(worker, ring, sight, now, lambda then: self._age_s(now, then))
        return sight

    def _from_outside(self, worker: Worker, now: int) -> list[int]:
        """Examine a rank that has no open ring.

        A rank that is exiting counts as active while its destructors use processor time.
        """
        activity = self._active(worker, now)
        age_ms = self._age_ms(now, activity.last_mono_ns)
        pending_ms = age_ms if activity.is_in_collective else -1
        return [int(activity.has_met), age_ms, pending_ms, activity.num_signs, 0]

    def _active(self, worker: Worker, now: int) -> Activity:
        return self._look_from_outside(self._activities, worker, now)

    def _look_from_outside(self, known: dict[int, Activity], worker: Worker, now: int) -> Activity:
        activity = known.get(worker.rank)
        if activity is None:
            activity = Activity(worker.pid, self._store_port, self._quiet_s, now)
            known[worker.rank] = activity
        activity.look(self._num_printed(worker.rank), now)
        return activity

    def _age_ms(self, now_mono_ns: int, then_mono_ns: int) -> int:
        if not then_mono_ns:
            return -1
        return max(0, int(1e3 * self._age_s(now_mono_ns, then_mono_ns)))

    def _age_s(self, now_mono_ns: int, then_mono_ns: int) -> float:
        return self._lived.since(then_mono_ns / 1e9, now_mono_ns / 1e9)


class Reports:
    """The rule that determines when a node reports on its ranks.

    A node reports rarely while its ranks show nothing unusual, so that the coordinator is not
    overloaded. A node reports immediately if its ranks have been waiting for half the stall
    timeout, if an operation exceeds its learned limit, if a rank completes its initialization, or
    if torch writes a dump of a rank.
    """

    def __init__(self, every_s: float, stall_timeout_ms: int) -> None:
        self._every_s = every_s
        self._unusual_ms = stall_timeout_ms / 2
        self._last_s = float("-inf")
        self._last_shape: tuple[object, ...] = ()
        self._was_unusual = False

    def is_due(self, sights: m.Sights, now_s: float, *, at_once: bool = False) -> bool:
        """Return whether to send this report now; if so, record it as sent."""
        folded = sights.folded
        ages = [max(row[2], row[3]) for row in sights.ranks]
        ages += [max(folded[2], folded[3])] if folded else []
        dumps = (*(row[6] for row in sights.ranks), *folded[6:])
        shape = (folded[1:2], [row[:2] for row in sights.ranks], dumps)
        is_unusual = max(ages) >= self._unusual_ms or sights.late_rank >= 0
        is_due = (
            at_once
            or is_unusual
            or self._was_unusual
            or shape != self._last_shape
            or now_s >= self._last_s + self._every_s
        )
        if is_due:
            self._last_s, self._last_shape, self._was_unusual = now_s, shape, is_unusual
        return is_due


def _dumps_of(worker: Worker) -> int:
    if worker.torch is None:
        return 0
    worker.torch.look()
    return worker.torch.num_own
