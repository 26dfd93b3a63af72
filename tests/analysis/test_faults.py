"""A small part of the fault matrix (`benchmarks/analysis/faults.py`), through real jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.analysis import faults

CHOSEN = [
    "shape_mismatch-OtherShape-4r3",
    "skipped_collective-SkipEqualBucket-4r1",
    "dead_process-Kill-4r3",
    "host_hang-HangInCode-4r2",
    "healthy-Mixed-3r0",
]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CHOSEN)
def test_a_real_job_gets_the_right_verdict(name: str, tmp_path: Path) -> None:
    case = next(case for case in faults.CASES if case.name == name)
    outcome = faults.run(case, tmp_path)
    log = (tmp_path / f"{name}.log").read_text(errors="replace")
    assert outcome.said == case.expected, outcome.summary + "\n" + log[-2000:]


def test_the_matrix_covers_what_one_host_can_show() -> None:
    from echelon.analysis.finding import Cause

    injected = [case for case in faults.CASES if case.cause != "healthy"]
    assert len(injected) >= 24
    assert len(faults.CASES) - len(injected) >= 8
    shown = {case.cause for case in injected}
    assert {cause.value for cause in Cause} - shown == {"network", "unknown"}


def test_a_job_that_does_not_end_is_stopped_and_the_matrix_goes_on() -> None:
    job = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert faults._ended(job, 0.05) is None
    assert job.returncode != 0
    assert faults._ended(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), 60) == 3
