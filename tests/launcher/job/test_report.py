"""The job's exit code is the root cause's."""

from __future__ import annotations

import pytest

from echelon.launcher.job.report import Ended, exit_code


def _ended(rank: int, code: int | None, order: int, *, stopped: bool = False) -> Ended:
    return Ended(rank, code, order, stopped)


@pytest.mark.parametrize(
    ("ranks", "culprits", "expected"),
    [
        ([_ended(0, 1, 0), _ended(1, 42, 1)], [1], 42),
        ([_ended(0, 1, 1), _ended(1, -9, 0)], [1], 137),
        ([_ended(0, 1, 0), _ended(1, 0, 1)], [1], 1),
        ([_ended(0, 3, 0), _ended(1, -15, 1, stopped=True)], [1], 1),
        ([_ended(0, 7, 1), _ended(1, 5, 0)], [], 5),
        ([_ended(0, 7, 0), _ended(1, 5, 1)], [99], 7),
        ([_ended(0, 1, 1), _ended(1, None, 0)], [1], 1),
        ([_ended(0, 124, 0), _ended(1, -15, 1)], [0], 1),
        ([_ended(0, 124, 0)], [], 1),
    ],
    ids=[
        "own code",
        "signal",
        "exited 0",
        "still hung",
        "nobody named",
        "unknown rank",
        "node lost",
        "124 is a time limit's",
        "124, nobody named",
    ],
)
def test_exit_code(ranks, culprits, expected):
    assert exit_code(ranks, {"culprit_ranks": culprits}) == expected


def test_without_a_verdict_the_first_failure_counts():
    assert exit_code([_ended(0, -6, 1), _ended(1, 2, 0)], None) == 2
