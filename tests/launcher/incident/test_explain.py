"""The program that explains an incident, beside a job that may be nice itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
from echelon.launcher.incident import explain
os.nice(int(sys.argv[1]))
before = os.getpriority(os.PRIO_PROCESS, 0)
explain.main()
print(before, os.getpriority(os.PRIO_PROCESS, 0))
"""


def _priorities(*argv: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *argv],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    before, after = map(int, done.stdout.split())
    return before, after


def test_the_explanation_of_a_nice_job_is_no_nicer_than_the_job():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    before, after = _priorities(str(max(0, 15 - own)), "--give-way")
    assert before >= 15
    assert after == before


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) >= 10, reason="these tests are nice")
def test_the_explanation_gives_way_only_where_ranks_still_run():
    before, after = _priorities("0", "--give-way")
    assert after == 10 > before
    before, after = _priorities("0")
    assert after == before, "a restart waits for the verdict"
