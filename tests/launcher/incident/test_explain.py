"""The program that explains an incident, beside a job that may be nice itself."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os
from echelon.launcher.incident import explain
os.nice(10)
before = os.getpriority(os.PRIO_PROCESS, 0)
explain.main()
print(before, os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_the_explanation_of_a_nice_job_is_no_nicer_than_the_job():
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    before, after = done.stdout.split()
    assert int(before) >= 10
    assert after == before
