"""Report how the job ended, in its exit code and in report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.launcher.coordinator.decide import EndedBy
from echelon.launcher.job.rundir import write_json

EXIT_USAGE = 2
EXIT_STALL = 3
NOT_CONCLUDED = "the launcher ended before it could conclude the job"
_TIMED_OUT = 124


@dataclass(slots=True)
class Ended:
    """The way in which a rank ended.

    `code` is the exit code, or the negative signal number as in `subprocess`. It is None if the
    rank's node was lost.
    """

    rank: int
    code: int | None
    order: int  # 0: the first of its attempt
    stopped: bool = False  # the launcher ended it
    epoch: int = 0  # the first one in which the other ranks continued without it; 0: none
    is_new: bool = False  # it has not ended: it has yet to join, on a node that connected late


@dataclass(slots=True)
class Incident:
    """One incident of the job, as it appears in the report."""

    folder: Path
    kind: str
    attempt: int
    reason: str
    verdict: Mapping[str, Any] | None = None
    root_cause: Mapping[str, Any] | None = None  # the last one reported
    victims: Mapping[str, Any] | None = None
    circumstances: dict[str, Any] | None = None  # what else a restart depends on
    recovered: bool = False  # the stall cleared, or a later attempt succeeded
    is_survived: bool = False  # a stall that ended with the loss of a rank, without a restart
    withdrawn: bool = False  # the ranks made progress before the verdict arrived
    is_early: bool = False  # an early look; if it lasts, the stall continues its incident
    ended: Mapping[int, Ended] = field(default_factory=dict)  # the ranks that have ended so far
    lost_earlier: Mapping[int, int] = field(default_factory=dict)  # rank -> epoch without it


@dataclass(kw_only=True, slots=True)
class Report:
    """The report on a job, which the coordinator extends while the job is running."""

    job_id: str
    world_size: int
    incidents: list[Incident] = field(default_factory=list)
    ranks: list[Ended] = field(default_factory=list)  # of the last attempt
    attempts: int = 0
    decisions: list[dict[str, Any]] = field(default_factory=list)  # what followed failed attempts
    continuations: list[dict[str, Any]] = field(default_factory=list)  # after losses
    not_replaced: list[dict[str, Any]] = field(default_factory=list)  # lost ranks, and why
    stopped: dict[str, Any] | None = None  # where the job stood, if a signal ended it
    ended_by: EndedBy = EndedBy.AGENT  # a success must be set explicitly
    exit_code: int = 1
    error: str = NOT_CONCLUDED

    def write(self, path: Path) -> None:
        """Write report.json."""
        write_json(
            path,
            {
                "format": 1,
                "job_id": self.job_id,
                "world_size": self.world_size,
                "attempts": self.attempts,
                "ended_by": self.ended_by.value,
                "exit_code": self.exit_code,
                "error": self.error,
                "ranks": [{"rank": r.rank, "exit_code": r.code} for r in self.ranks],
                "decisions": self.decisions,
                "continuations": self.continuations,
                "not_replaced": self.not_replaced,
                "stopped": self.stopped,
                "incidents": [
                    {
                        "folder": str(incident.folder.relative_to(path.parent)),
                        "kind": incident.kind,
                        "attempt": incident.attempt,
                        "reason": incident.reason,
                        "verdict": incident.verdict,
                        "root_cause": incident.root_cause,
                        "victims": incident.victims,
                        "recovered": incident.recovered,
                        "withdrawn": incident.withdrawn,
                    }
                    for incident in self.incidents
                ],
            },
        )


def exit_code(ranks: Sequence[Ended], verdict: Mapping[str, Any] | None) -> int:
    """Return the exit code of a job whose workers failed.

    The result is the code of the first culprit that failed or, if the verdict does not name a
    culprit, of the rank that failed first. If all culprits hung or exited with code 0, the result
    is 1. The code of a rank that was killed by a signal is 128 plus the signal's number. The code
    of a rank that was lost with its node is 1. Code 124 becomes 1, because schedulers interpret 124
    as an expired time limit.
    """
    by_rank = {ended.rank: ended for ended in ranks}
    culprits = [by_rank[r] for r in (verdict or {}).get("culprit_ranks", []) if r in by_rank]
    if culprits:
        codes = [_as_shell(ended.code) for ended in culprits if not ended.stopped]
        return next((code for code in codes if code), 1)
    failed = sorted((r for r in ranks if r.code), key=lambda ended: ended.order)
    return _as_shell(failed[0].code) if failed else 0


def _as_shell(code: int | None) -> int:
    if code is None or code == _TIMED_OUT:
        return 1
    return code if code >= 0 else 128 - code
