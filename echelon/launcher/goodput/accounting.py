"""Split each rank's time into categories, based on the recorded facts.

Every rank's time is split into consecutive segments, and each segment is split into the categories
below. The times of a rank add up exactly to the job's time.

    start-up    until the first step of the first attempt
    useful      steps that no earlier attempt had finished, minus the next three categories
    waiting     blocked in collectives and point-to-point operations within those steps
    data        waiting for the next batch within those steps
    checkpoint  saving and loading within or between steps
    repeated    steps that an earlier attempt had already finished
    stall       from the last sign of progress until the stall cleared or the ranks were stopped
    restart     the interrupted step, and the time until the first step of the next attempt
    idle        the rank had ended, or was not part of the world
    unmarked    the program ran but marked no steps

[Note: step numbers after a restart] After a restart, a program may continue from its checkpoint's
step number, or start again at 0. If an attempt has loaded a checkpoint and begins at step 0 or 1,
its steps are assumed to follow the step of the newest earlier checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from echelon.launcher.goodput.facts import Attempt, Job, Lap, RankRun, Spent


class Category(Enum):
    """The categories into which a rank's time is split."""

    USEFUL = "useful"
    WAITING = "waiting"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    REPEATED = "repeated"
    STALL = "stall"
    RESTART = "restart"
    START_UP = "start-up"
    IDLE = "idle"
    UNMARKED = "unmarked"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of one rank's time; the `parts` add up to the segment's length.

    Attributes:
        blamed: the index of the failed attempt to which this segment's `restart` and `repeated`
            times are attributed; -1 for none.
    """

    began_ns: int
    ended_ns: int
    parts: Mapping[Category, int]
    blamed: int = -1


@dataclass(frozen=True, slots=True)
class _Numbering:
    """The relation between an attempt's step numbers and the job's step numbers.

    The job's step number is the attempt's step number plus `base`. Job steps below `done` were
    finished by earlier attempts.
    """

    base: int
    done: int


def segments(job: Job) -> dict[int, list[Segment]]:
    """Return each rank's segments from 0 to `job.now_ns`, in order and without gaps."""
    numberings = _numberings(job)
    marks_steps = any(run.laps for one in job.attempts for run in one.runs.values())
    return {rank: list(_of_rank(job, rank, numberings, marks_steps)) for rank in job.ranks}


def _numberings(job: Job) -> list[_Numbering]:
    made, done, saved = list[_Numbering](), 0, -1
    for attempt in job.attempts:
        runs = attempt.runs.values()
        first = min((run.laps[0].first_step for run in runs if run.laps), default=0)
        resumes = bool(made) and saved >= 0 and first <= 1 and any(run.num_loads for run in runs)
        base = saved if resumes else 0
        made.append(_Numbering(base, done))
        done = max([done, *(base + run.laps[-1].end_step for run in runs if run.laps)])
        here = max((run.saved_step for run in runs), default=-1)
        saved = base + here if here >= 0 else saved
    return made


def _of_rank(
    job: Job, rank: int, numberings: list[_Numbering], marks_steps: bool
) -> Iterator[Segment]:
    at = 0
    for i, attempt in enumerate(job.attempts):
        before = Category.RESTART if i else Category.START_UP
        began = _clip(attempt.began_ns, at, job.now_ns)
        yield from _whole(at, began, before, i - 1)
        end = job.now_ns if attempt.ended_ns is None else attempt.ended_ns
        end = _clip(end, began, job.now_ns)
        run = attempt.runs.get(rank)
        if run is None:
            yield from _whole(began, end, Category.IDLE)
        else:
            joined = began if run.began_ns is None else _clip(run.began_ns, began, end)
            yield from _whole(began, joined, Category.IDLE)
            cut = _Cut(i, attempt, run, joined, end, numberings[i], marks_steps)
            yield from cut.segments()
        at = end
    yield from _whole(at, job.now_ns, Category.IDLE)


class _Cut:
    """The facts about one rank in one attempt, from which the rank's segments are computed."""

    def __init__(
        self,
        index: int,
        attempt: Attempt,
        run: RankRun,
        began_ns: int,
        ended_ns: int,
        numbering: _Numbering,
        marks_steps: bool,
    ) -> None:
        self._index, self._run, self._numbering = index, run, numbering
        self._began, self._ended = began_ns, ended_ns
        self._marks_steps = marks_steps
        stop = ended_ns if run.ended_ns is None else run.ended_ns
        self._stopped = _clip(stop, began_ns, ended_ns)
        failed = attempt.failed_ns
        self._failed = None if failed is None else _clip(failed, began_ns, ended_ns)
        limit = ended_ns if self._failed is None else self._failed
        self._stalls = [
            (began, _clip(limit if until < 0 else until, began, limit))
            for began, until in attempt.stalls
        ]

    def segments(self) -> Iterator[Segment]:
        """Yield the rank's segments in order."""
        at, run = self._began, self._run
        before = Category.RESTART if self._index else Category.START_UP
        if run.laps:
            first = _clip(run.laps[0].began_ns, at, self._stopped)
            yield from self._plain(at, first, before, self._index - 1)
            at = first
        for lap in run.laps:
            end = _clip(lap.ended_ns, at, self._stopped)
            yield from self._steps(at, end, lap)
            at = end
        is_lost = self._failed is not None and self._failed <= self._stopped
        if is_lost:
            assert self._failed is not None
            worked = max(at, self._failed)
            has_begun = bool(run.laps) or not self._marks_steps
            kind = Category.RESTART if has_begun or self._index else Category.START_UP
            blamed = self._index if has_begun else self._index - 1
            yield from self._plain(at, worked, kind, blamed)
            yield from _whole(worked, self._ended, Category.RESTART, self._index)
            return
        yield from self._rest(at, before)
        yield from _whole(self._stopped, self._ended, Category.IDLE)

    def _rest(self, at: int, before: Category) -> Iterator[Segment]:
        """Yield the segments after the rank's last lap (run of steps).

        If the rank has no laps, yield all of its segments.
        """
        run = self._run
        if run.laps:
            step = run.laps[-1].end_step
            last = Lap(
                first_step=step, end_step=step + 1, began_ns=at, ended_ns=self._stopped,
                spent=run.unfinished,
            )  # fmt: skip
            yield from self._steps(at, self._stopped, last)
        elif self._marks_steps:
            yield from self._plain(at, self._stopped, before, self._index - 1)
        else:
            yield from self._plain(at, self._stopped, Category.UNMARKED)

    def _plain(
        self, began: int, ended: int, category: Category, blamed: int = -1
    ) -> Iterator[Segment]:
        if ended > began:
            stalled = self._stalled(began, ended)
            parts = {Category.STALL: stalled, category: ended - began - stalled}
            yield Segment(began, ended, _nonzero(parts), blamed)

    def _steps(self, began: int, ended: int, lap: Lap) -> Iterator[Segment]:
        if ended > began:
            stalled = self._stalled(began, ended)
            parts = _parts(lap, ended - began - stalled, stalled, self._numbering)
            parts[Category.STALL] = stalled
            yield Segment(began, ended, _nonzero(parts), self._index - 1)

    def _stalled(self, began: int, ended: int) -> int:
        """Return how long the attempt was stalled between `began` and `ended`."""
        return sum(max(0, min(ended, to) - max(began, since)) for since, to in self._stalls)


def _parts(lap: Lap, left: int, stalled: int, numbering: _Numbering) -> dict[Category, int]:
    """Split the time of a lap (a run of steps), excluding stalls, into categories."""
    spent = _without(lap.spent, stalled)
    saving = min(spent.checkpoint_ns, left)
    left -= saving
    num = lap.end_step - lap.first_step
    num_repeated = _clip(numbering.done - numbering.base - lap.first_step, 0, max(num, 0))
    num = max(num, 1)
    repeated = left * num_repeated // num
    left -= repeated
    waited = min(spent.waited_ns * (num - num_repeated) // num, left)
    data = min(spent.data_ns * (num - num_repeated) // num, left - waited)
    return {
        Category.CHECKPOINT: saving,
        Category.REPEATED: repeated,
        Category.WAITING: waited,
        Category.DATA: data,
        Category.USEFUL: left - waited - data,
    }


def _without(spent: Spent, stalled: int) -> Spent:
    """Subtract stalled time from collective time, then from checkpoint time and data-wait time."""
    left = [spent.waited_ns, spent.checkpoint_ns, spent.data_ns]
    for i, ns in enumerate(left):
        left[i] = max(0, ns - stalled)
        stalled -= ns - left[i]
    return Spent(waited_ns=left[0], checkpoint_ns=left[1], data_ns=left[2])


def _whole(began: int, ended: int, category: Category, blamed: int = -1) -> Iterator[Segment]:
    if ended > began:
        yield Segment(began, ended, {category: ended - began}, blamed)


def _nonzero(parts: Mapping[Category, int]) -> dict[Category, int]:
    return {category: ns for category, ns in parts.items() if ns}


def _clip(value: int, low: int, high: int) -> int:
    return min(max(value, low), max(low, high))
