"""Record on the hosting node how a job spends its time, and save the record to a file.

The file is written every few seconds while the job runs, and at the end of each attempt. If writes
are slow, the file is written less often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import observers as o
from echelon.launcher.goodput.facts import Attempt, Job, Lap, RankRun, Spent
from echelon.launcher.goodput.writer import Writer

_MAX_LAPS = 1 << 16  # of all ranks of an attempt
_EVERY_S = 2.0
_MAX_SHARE = 0.01  # of the time may be spent on writing
_CLOSE_S = 5.0


class Book:
    """An observer that records how one job spends its time.

    Args:
        stall_timeout_s: how many seconds without progress count as a stall.
        say: a function that prints a line.
        now_ns: a function that returns the monotonic time, in ns.
    """

    def __init__(
        self,
        job_id: str,
        run_dir: Path,
        stall_timeout_s: float,
        say: Callable[[str], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.job = Job(job_id=job_id)
        self._writer = Writer(run_dir)
        self._stall_ns = int(stall_timeout_s * 1e9)
        self._say = say
        self._clock = now_ns
        self._origin_ns = now_ns()
        self._due_ns = 0
        self._has_failed = False
        self._lock = (
            threading.Lock()
        )  # for `snapshot`; all else happens on the launcher's own thread

    def now_ns(self) -> int:
        """Return the time since the job began, in ns."""
        return self._clock() - self._origin_ns

    def __call__(self, happening: o.Happening) -> None:
        """Record one of the job's events."""
        with self._lock:
            now = self._take(happening)
        if not isinstance(happening, o.LapsReported | o.RankEnded) or now >= self._due_ns:
            self.write()

    def snapshot(self) -> Job:
        """Return a copy of the current facts, for another thread to read."""
        with self._lock:
            now = self.job.now_ns if self.job.ended_by else self.now_ns()
            attempts = [
                replace(
                    one,
                    runs={
                        rank: replace(run, laps=list(run.laps)) for rank, run in one.runs.items()
                    },
                    stalls=[list(stall) for stall in one.stalls],
                    continued=list(one.continued),
                )
                for one in self.job.attempts
            ]
            return replace(self.job, now_ns=now, attempts=attempts)

    def _take(self, happening: o.Happening) -> int:
        self.job.now_ns = now = self.now_ns()
        if isinstance(happening, o.AttemptBegan):
            runs = {rank: RankRun(host=host) for rank, host in happening.hosts.items()}
            self.job.attempts.append(Attempt(number=happening.attempt, began_ns=now, runs=runs))
        elif isinstance(happening, o.JobEnded):
            self.job.ended_by, self.job.exit_code = happening.ended_by, happening.exit_code
        elif isinstance(happening, o.VerdictKnown):
            self._name_cause(happening)
        elif self.job.attempts and not isinstance(happening, o.Restarting):
            self._note(self.job.attempts[-1], happening, now)
        return now

    def write(self) -> None:
        """Request that the file be written. If a write has failed, print why, but only once."""
        self._writer.put(self.snapshot())
        took_s = max(_EVERY_S, self._writer.took_s / _MAX_SHARE)
        self._due_ns = self.now_ns() + int(took_s * 1e9)
        self._say_error()

    def close(self) -> None:
        """Wait up to 5 s for the file to be written."""
        if not self._writer.flush(_CLOSE_S):
            self._say("could not write the account of the job's time: the disk does not respond")
        self._say_error()

    def _say_error(self) -> None:
        if self._writer.error and not self._has_failed:
            self._has_failed = True
            self._say(f"could not write the account of the job's time: {self._writer.error}")

    def _note(self, attempt: Attempt, happening: o.Happening, now: int) -> None:
        if isinstance(happening, o.LapsReported):
            if happening.laps.attempt == attempt.number:
                self._add_laps(attempt, happening.laps, now)
        elif isinstance(happening, o.RankEnded):
            run = attempt.runs.get(happening.rank)
            if run is not None:
                run.ended_ns = now
            if happening.code != 0 and not happening.is_survived and attempt.failed_ns is None:
                attempt.failed_ns = now
        elif isinstance(happening, o.RankReplaced):
            run = attempt.runs.setdefault(
                happening.rank, RankRun(host=happening.host, began_ns=now)
            )
            run.ended_ns, run.host = None, happening.host
        elif isinstance(happening, o.IncidentBegan):
            attempt.reason = happening.reason
            if happening.kind == "stall":
                _begin_stall(attempt, now, 0 if happening.is_early else self._stall_ns)
        elif isinstance(happening, o.Continued):
            attempt.continued.append(happening.line)
            _end_stall(attempt, now)  # the loss may have been the stall's end
        elif isinstance(happening, o.StallCleared):
            _end_stall(attempt, now)
        elif isinstance(happening, o.AttemptEnded):
            _end_stall(attempt, now if attempt.failed_ns is None else attempt.failed_ns)
            attempt.ended_ns = now
            if happening.failed and not attempt.reason:
                attempt.reason = f"ended by {happening.ended_by}"

    def _name_cause(self, known: o.VerdictKnown) -> None:
        for attempt in self.job.attempts:
            if attempt.number == known.incident.attempt and known.incident.verdict is not None:
                attempt.cause = str(known.incident.verdict.get("cause", ""))

    def _add_laps(self, attempt: Attempt, laps: m.Laps, now: int) -> None:
        max_laps = min(max(_MAX_LAPS // max(len(attempt.runs), 1), 16), 512)
        for rank, first, end, began_us, ended_us, *spent in laps.laps:
            run = attempt.runs.get(rank)
            if run is None:
                continue
            began, ended = now - 1000 * began_us, now - 1000 * ended_us
            if run.laps:  # laps are contiguous, and network delays make ages inexact
                began = run.laps[-1].ended_ns
            lap = Lap(
                first_step=first, end_step=end, began_ns=began, ended_ns=max(began, ended),
                spent=_spent(spent),
            )  # fmt: skip
            run.add(lap, max_laps)
        for rank, step, age_ms, saved, loads, *spent in laps.ranks:
            run = attempt.runs.get(rank)
            if run is not None:
                run.step, run.saved_step, run.num_loads = step, saved, loads
                run.progress_ns = None if age_ms < 0 else now - 1_000_000 * age_ms
                run.unfinished = _spent(spent)


def _begin_stall(attempt: Attempt, now: int, lasted_ns: int) -> None:
    """Record a stall that began at the last sign of progress.

    The stall has already lasted for at least `lasted_ns` nanoseconds.
    """
    if attempt.stalls and attempt.stalls[-1][1] < 0:
        return
    seen = [run.progress_ns for run in attempt.runs.values() if run.progress_ns is not None]
    since = min(max(seen, default=now), now - lasted_ns)
    before = max([attempt.began_ns, *(ended for _, ended in attempt.stalls)])
    attempt.stalls.append([max(since, before), -1])


def _end_stall(attempt: Attempt, now: int) -> None:
    if attempt.stalls and attempt.stalls[-1][1] < 0:
        attempt.stalls[-1][1] = max(now, attempt.stalls[-1][0])


def _spent(us: Sequence[int]) -> Spent:
    waited, saving, data = us
    return Spent(waited_ns=1000 * waited, checkpoint_ns=1000 * saving, data_ns=1000 * data)
