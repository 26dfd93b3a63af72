"""The job's exit code is the root cause's."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launcher.harvest import Worker
from echelon.launcher.report import exit_code


def _worker(rank: int, code: int | None, order: int = -1, *, stopped: bool = False) -> Worker:
    return Worker(
        rank=rank,
        folder=Path(),
        pid=1,
        exit_code=code,
        exit_order=order,
        stopped_by_agent=stopped,
    )


@pytest.mark.parametrize(
    ("workers", "culprits", "expected"),
    [
        ([_worker(0, 1, 0), _worker(1, 42, 1)], [1], 42),
        ([_worker(0, 1, 1), _worker(1, -9, 0)], [1], 137),
        ([_worker(0, 1, 0), _worker(1, 0, 1)], [1], 1),
        ([_worker(0, 3, 0), _worker(1, -15, 1, stopped=True)], [1], 1),
        ([_worker(0, 7, 1), _worker(1, 5, 0)], [], 5),
        ([_worker(0, 7, 0), _worker(1, 5, 1)], [99], 7),
    ],
    ids=["own code", "signal", "exited 0", "still hung", "nobody named", "unknown rank"],
)
def test_exit_code(workers, culprits, expected):
    assert exit_code(workers, {"culprit_ranks": culprits}) == expected


def test_without_a_verdict_the_first_failure_counts():
    assert exit_code([_worker(0, -6, 1), _worker(1, 2, 0)], None) == 2
