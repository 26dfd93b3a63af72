"""Compute the time spent in each category, per rank and in total, and the cost of each failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.launcher.goodput.accounting import Category, Segment, segments
from echelon.launcher.goodput.facts import Job

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of one failed attempt, averaged over all ranks.

    Attributes:
        restart_ns: the time between the failure and the first step of the next attempt, including
            the step that the failure interrupted.
        repeated_ns: the time spent repeating steps.
    """

    attempt: int
    reason: str
    cause: str
    restart_ns: int
    repeated_ns: int


@dataclass(frozen=True, slots=True)
class Shares:
    """A job's time, split into categories."""

    wall_ns: int
    ranks: Mapping[int, Mapping[Category, int]]
    losses: Sequence[Loss]

    @property
    def totals(self) -> dict[Category, int]:
        """The sum of the ranks' times, by category."""
        return {
            category: sum(of_rank.get(category, 0) for of_rank in self.ranks.values())
            for category in Category
        }

    def share(self, *categories: Category) -> float:
        """Return the fraction of all ranks' time that was spent in the given categories."""
        totals = self.totals
        return _ratio(sum(totals[one] for one in categories), self.wall_ns * len(self.ranks))

    @property
    def goodput(self) -> float:
        """The fraction of all ranks' time that was spent on useful steps.

        Waiting for other ranks counts as useful, but checkpoints and waiting for data do not.
        """
        return self.share(Category.USEFUL, Category.WAITING)

    def to_json(self) -> dict[str, Any]:
        """Return all times in seconds, as a JSON object."""
        num = max(len(self.ranks), 1)
        return {
            "wall_s": self.wall_ns / 1e9,
            "goodput": round(self.goodput, 6),
            "mean_s": {one.value: ns / num / 1e9 for one, ns in self.totals.items()},
            "ranks": {
                str(rank): {one.value: of_rank.get(one, 0) / 1e9 for one in Category}
                for rank, of_rank in self.ranks.items()
            },
            "losses": [
                {
                    "attempt": loss.attempt,
                    "reason": loss.reason,
                    "cause": loss.cause,
                    "restart_s": loss.restart_ns / 1e9,
                    "repeated_s": loss.repeated_ns / 1e9,
                }
                for loss in self.losses
            ],
        }


def shares(job: Job) -> Shares:
    """Return how much time each rank spent in each category, and the cost of each failure."""
    cut = segments(job)
    totals = {rank: _added(of_rank) for rank, of_rank in cut.items()}
    return Shares(job.now_ns, totals, _losses(job, cut))


def _added(of_rank: Sequence[Segment]) -> dict[Category, int]:
    totals: dict[Category, int] = {}
    for segment in of_rank:
        for category, ns in segment.parts.items():
            totals[category] = totals.get(category, 0) + ns
    return totals


def _losses(job: Job, cut: Mapping[int, Sequence[Segment]]) -> list[Loss]:
    costs: dict[int, list[int]] = {}
    for of_rank in cut.values():
        for segment in of_rank:
            if segment.blamed >= 0:
                cost = costs.setdefault(segment.blamed, [0, 0])
                cost[0] += segment.parts.get(Category.RESTART, 0)
                cost[1] += segment.parts.get(Category.REPEATED, 0)
    num = max(len(cut), 1)
    made = []
    for i, attempt in enumerate(job.attempts):
        if attempt.failed_ns is None:
            continue
        restart, repeated = costs.get(i, [0, 0])
        made.append(
            Loss(attempt.number, attempt.reason, attempt.cause, restart // num, repeated // num)
        )
    return made


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
