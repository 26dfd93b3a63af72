"""Launched jobs with `--standby`: a restart begins in processes that were ready."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.background import Node
from tests.support.ranks import read_json

pytestmark = pytest.mark.ranks

# Steps until the file `go` exists; the first attempt's rank is then killed.
_JOB = """
import os, pathlib, signal, sys, time
import numpy as np
import echelon.dist as dist
from echelon import recorder

here = pathlib.Path(__file__).parent
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
world = dist.init(timeout_s=600)
print("attempt", restart, "of", world.rank, "in", os.environ["ECHELON_RANK_DIR"], flush=True)
x, go = np.ones(4, np.float32), np.zeros(1)
for step in range(1_000_000):
    recorder.step(step)
    go[0] = (here / "go").exists()
    world.all_reduce(go)
    if go[0]:
        break
    time.sleep(0.02)
if restart == "0" and world.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
world.all_reduce(x)
dist.shutdown()
"""


@pytest.fixture
def job(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(_JOB)
    options = ("--nproc-per-node", "1", "--standby", "1", "--max-restarts", "1")
    made = Node(tmp_path / "run", [*options, str(script)])
    yield made
    made.close()


def _wait_ready(job: Node) -> None:
    """Wait for the standby: on a busy machine it loads for minutes."""
    deadline_s = time.monotonic() + 600.0
    while not job.has("1 standby is ready") and job.process.poll() is None:
        assert time.monotonic() < deadline_s, "\n".join(job.lines)
        signal.sigtimedwait([], 0.1)


def test_a_restart_begins_in_standbys(job, tmp_path):
    _wait_ready(job)
    (tmp_path / "go").touch()
    assert job.end() == 0, "\n".join(job.lines)
    assert job.has("started from standbys: 1 of 1 ranks"), "\n".join(job.lines)
    folder = tmp_path / "run" / "rank_0" / "attempt_1"
    assert job.has(f"attempt 1 of 0 in {folder}")
    assert (folder / "ring").is_file(), "its black box is in its own folder"
    report = read_json(tmp_path / "run" / "report.json")
    assert (report["ended_by"], report["exit_code"], report["attempts"]) == ("worker", 0, 2)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_standbys_end_with_the_launcher(job, number):
    _wait_ready(job)
    handles = [os.pidfd_open(pid) for pid in _standbys_of(job.process.pid)]
    try:
        assert len(handles) == 1
        job.process.send_signal(number)
        assert job.end() == (-number if number == signal.SIGKILL else 128 + number)
        for handle in handles:
            assert select.select([handle], [], [], 60.0)[0] == [handle]
    finally:
        for handle in handles:
            os.close(handle)


def _standbys_of(launcher: int) -> list[int]:
    """Return the processes below the launcher's guard that wait."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _text(folder / "comm").strip() == "echelon-standby":
            guard = _text(folder / "stat").rpartition(")")[2].split()[1]
            above = _text(Path("/proc") / guard / "stat").rpartition(")")[2].split()[1]
            if int(above) == launcher:
                found.append(int(folder.name))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
