"""`echelon status` reads from their rings what ranks are doing, even while they hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from echelon.launcher.status.status import newest_run, read_statuses, ring_paths
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_JOB = """
import os, pathlib, subprocess, sys
import numpy as np
import echelon.dist as dist
from echelon import recorder

world = dist.init(timeout_s=60)
x = np.ones(4)
for step in range(5):
    recorder.step()
    world.all_reduce(x)
run = pathlib.Path(os.environ["ECHELON_RANK_DIR"]).parents[1]
if world.rank == 1:
    with recorder.span("data_wait"):
        done = subprocess.run([sys.executable, "-m", "echelon", "status", str(run)],
                              capture_output=True, text=True)
    (run / "table.txt").write_text(done.stdout + done.stderr)
world.all_reduce(x)
dist.shutdown()
"""


def test_a_running_job_is_shown_and_an_ended_one_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_JOB))
    run_dir = tmp_path / "runs/one"
    done = run_echelon("run", "--nproc-per-node", "2", "--run-dir", str(run_dir), str(script))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in (run_dir / "table.txt").read_text().splitlines()]
    shown = {row[0]: row for row in rows if row and row[0] in ("0", "1")}
    assert shown["0"][1:5] == ["in", "operation", "all_reduce", "5"]
    assert shown["1"][1:4] == ["data_wait", "all_reduce", "4"]
    assert shown["1"][6] == "4"  # the step
    assert [status.phase for status in read_statuses(run_dir)] == ["ended", "ended"]
    endpoint = read_json(run_dir / "job.json")["endpoint"]
    shown = run_echelon("status", endpoint, cwd=tmp_path)
    assert (shown.returncode, shown.stdout.count("ended")) == (0, 2), shown.stderr


def test_the_newest_attempt_of_the_newest_run_counts(tmp_path):
    for run, age in (("old", 1), ("new", 2)):
        (tmp_path / run / "rank_0/attempt_2").mkdir(parents=True)
        (tmp_path / run / "rank_0/attempt_10").mkdir(parents=True)
        (tmp_path / run / "rank_0/attempt_2/ring").touch()
        (tmp_path / run / "rank_0/attempt_10/ring").touch()
        job = tmp_path / run / "job.json"
        job.write_text(json.dumps({}))
        os.utime(job, (age, age))
    assert newest_run(tmp_path) == tmp_path / "new"
    assert ring_paths(tmp_path / "new")[0].parent.name == "attempt_10"
    assert [status.phase for status in read_statuses(tmp_path / "new")] == ["unreadable"]


def test_a_rank_that_was_killed_is_gone(tmp_path):
    code = "import os; from echelon import recorder; recorder.step(); os.kill(os.getpid(), 9)"
    rank_dir = tmp_path / "rank_0/attempt_0"
    rank_dir.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ECHELON_RANK_DIR": str(rank_dir)},
        check=False,
    )  # fmt: skip
    assert done.returncode == -9
    assert [status.phase for status in read_statuses(tmp_path)] == ["gone"]


def test_no_run_is_one_line_and_exit_code_2(tmp_path):
    for argv in ([], [str(tmp_path)]):
        done = run_echelon("status", *argv, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
