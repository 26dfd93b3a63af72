"""Define the record of how a job spends its time, and the file that contains the record.

All timestamps are in nanoseconds since the job began, on the hosting node's monotonic clock. A
*lap* is one or more consecutive steps of a rank. A lap also records how long its steps waited for
other ranks, for checkpoints and for data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.launcher.job.rundir import ACCOUNT, write_json

FORMAT = 1

_MAX_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The time that a rank spent communicating, handling checkpoints and waiting for data."""

    waited_ns: int = 0
    checkpoint_ns: int = 0
    data_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """The steps [first_step, end_step) of one rank. If the range is empty, no step has ended."""

    first_step: int
    end_step: int
    began_ns: int
    ended_ns: int
    spent: Spent = Spent()

    def joined(self, later: Lap) -> Lap:
        """Return this lap combined with the lap that follows it."""
        one, other = self.spent, later.spent
        return Lap(
            first_step=self.first_step,
            end_step=later.end_step,
            began_ns=self.began_ns,
            ended_ns=later.ended_ns,
            spent=Spent(
                waited_ns=one.waited_ns + other.waited_ns,
                checkpoint_ns=one.checkpoint_ns + other.checkpoint_ns,
                data_ns=one.data_ns + other.data_ns,
            ),
        )


@dataclass(kw_only=True, slots=True)
class RankRun:
    """The record of how one rank spent its time in one attempt."""

    host: str
    began_ns: int | None = None  # if it joined later than the attempt began
    laps: list[Lap] = field(default_factory=list)
    ended_ns: int | None = None  # None: not known to have ended
    unfinished: Spent = Spent()  # in the step that has not ended
    step: int = -1  # the present step, -1: none
    progress_ns: int | None = None  # when it last began or ended something
    saved_step: int = -1  # the step of its last checkpoint
    num_loads: int = 0  # how many checkpoints it has loaded

    def add(self, lap: Lap, max_laps: int) -> None:
        """Append a lap; if this exceeds `max_laps`, merge adjacent laps in pairs."""
        self.laps.append(lap)
        if len(self.laps) <= max_laps:
            return
        pairs = range(0, len(self.laps) - 1, 2)
        joined = [self.laps[i].joined(self.laps[i + 1]) for i in pairs]
        self.laps = joined + self.laps[2 * len(joined) :]


@dataclass(kw_only=True, slots=True)
class Attempt:
    """The facts about one attempt of the job."""

    number: int
    began_ns: int
    failed_ns: int | None = None  # its first failure, or the signal that ended it
    ended_ns: int | None = None  # when nothing of its ranks was left
    reason: str = ""  # why it ended, in words
    cause: str = ""  # the verdict's cause
    runs: dict[int, RankRun] = field(default_factory=dict)
    stalls: list[list[int]] = field(default_factory=list)  # [began_ns, ended_ns; -1: it lasts]
    continued: list[str] = field(default_factory=list)  # a line for each loss that it survived


@dataclass(kw_only=True, slots=True)
class Job:
    """The record of how a job spends its time."""

    job_id: str
    now_ns: int = 0  # the job's end, or when this was written
    ended_by: str = ""  # "" if it still runs, or if its launcher was killed
    exit_code: int | None = None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """The numbers of all ranks that took part in any attempt, in ascending order."""
        return sorted({rank for attempt in self.attempts for rank in attempt.runs})


def write_job(job: Job, run_dir: Path) -> None:
    """Write a job's record to its run directory atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_dir / ACCOUNT, to_json(job), indent=None)


def read_job(run_dir: Path) -> Job:
    """Read, from a run directory, the record of how the job spends its time.

    Raises:
        ValueError: the file is missing or damaged, or has a newer format.
    """
    path = run_dir / ACCOUNT
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(
                f"{path}: the file is too large to be a job's time record (over {_MAX_BYTES} B)"
            )
        top = json.loads(path.read_text())
    except OSError as err:
        raise ValueError(f"{path}: {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{path}: the file is damaged ({err})") from err
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        found = top.get("format") if isinstance(top, dict) else None
        raise ValueError(
            f"{path}: the file has format {found!r}, but this version of echelon "
            f"reads format {FORMAT}"
        )
    try:
        return from_json(top)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise ValueError(f"{path}: the file is damaged ({err!r:.200})") from err


def to_json(job: Job) -> dict[str, Any]:
    """Return the record as a JSON object."""
    return {
        "format": FORMAT,
        "job_id": job.job_id,
        "now_ns": job.now_ns,
        "ended_by": job.ended_by,
        "exit_code": job.exit_code,
        "attempts": [
            {
                "number": one.number,
                "began_ns": one.began_ns,
                "failed_ns": one.failed_ns,
                "ended_ns": one.ended_ns,
                "reason": one.reason,
                "cause": one.cause,
                "runs": {str(rank): _of_run(run) for rank, run in one.runs.items()},
                "stalls": one.stalls,
                "continued": one.continued,
            }
            for one in job.attempts
        ],
    }


def _of_run(run: RankRun) -> dict[str, Any]:
    return {
        "host": run.host,
        "began_ns": run.began_ns,
        "laps": [
            [lap.first_step, lap.end_step, lap.began_ns, lap.ended_ns, *_of_spent(lap.spent)]
            for lap in run.laps
        ],
        "ended_ns": run.ended_ns,
        "unfinished": _of_spent(run.unfinished),
        "step": run.step,
        "progress_ns": run.progress_ns,
        "saved_step": run.saved_step,
        "num_loads": run.num_loads,
    }


def _of_spent(spent: Spent) -> list[int]:
    return [spent.waited_ns, spent.checkpoint_ns, spent.data_ns]


def from_json(top: Mapping[str, Any]) -> Job:
    """Restore a record from the result of `to_json`.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the input is malformed.
    """
    return Job(
        job_id=_text(top["job_id"]),
        now_ns=_number(top["now_ns"]),
        ended_by=_text(top["ended_by"]),
        exit_code=_maybe(top["exit_code"]),
        attempts=[_attempt(one) for one in top["attempts"]],
    )


def _attempt(one: Mapping[str, Any]) -> Attempt:
    return Attempt(
        number=_number(one["number"]),
        began_ns=_number(one["began_ns"]),
        failed_ns=_maybe(one["failed_ns"]),
        ended_ns=_maybe(one["ended_ns"]),
        reason=_text(one["reason"]),
        cause=_text(one["cause"]),
        runs={int(rank): _run(run) for rank, run in one["runs"].items()},
        stalls=[[_number(began), _number(ended)] for began, ended in one["stalls"]],
        continued=[_text(line) for line in one.get("continued", [])],  # not in older files
    )


def _run(run: Mapping[str, Any]) -> RankRun:
    return RankRun(
        host=_text(run["host"]),
        began_ns=_maybe(run.get("began_ns")),  # not in older files
        laps=[_lap(*map(_number, row)) for row in run["laps"]],
        ended_ns=_maybe(run["ended_ns"]),
        unfinished=_spent(*map(_number, run["unfinished"])),
        step=_number(run["step"]),
        progress_ns=_maybe(run["progress_ns"]),
        saved_step=_number(run["saved_step"]),
        num_loads=_number(run["num_loads"]),
    )


def _lap(first: int, end: int, began_ns: int, ended_ns: int, *spent: int) -> Lap:
    return Lap(
        first_step=first, end_step=end, began_ns=began_ns, ended_ns=ended_ns, spent=_spent(*spent)
    )


def _spent(waited_ns: int, checkpoint_ns: int, data_ns: int) -> Spent:
    return Spent(waited_ns=waited_ns, checkpoint_ns=checkpoint_ns, data_ns=data_ns)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r:.50}")
    return value


def _maybe(value: object) -> int | None:
    return None if value is None else _number(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.50}")
    return value
