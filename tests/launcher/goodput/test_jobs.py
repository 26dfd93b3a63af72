"""The account of real jobs: one that is restarted, and one whose launcher is killed."""

from __future__ import annotations

import os
import signal
import textwrap
import time

import pytest

from echelon.launcher.goodput.accounting import Category
from echelon.launcher.goodput.facts import read_job
from echelon.launcher.goodput.shares import shares
from tests.launcher.background import WAIT_S, Node
from tests.support.ranks import run_echelon

pytestmark = pytest.mark.ranks

_DIES_ONCE = """
    import os, pathlib, sys, time
    from echelon import recorder
    saved = pathlib.Path(sys.argv[1])
    begin = 0
    if saved.exists():
        with recorder.span("checkpoint", "load"):
            begin = int(saved.read_text())
    for number in range(begin, 10):
        recorder.step(number)
        time.sleep(0.02)
        if number == 3 and not begin:
            with recorder.span("checkpoint", "save"):
                saved.write_text("4")
        if number == 7 and not begin:
            os.kill(os.getpid(), 9)
"""


def test_a_restarted_job_has_repeated_what_was_not_saved(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_DIES_ONCE))
    done = run_echelon(
        "run", "--max-restarts", "1", "--run-dir", str(tmp_path / "run"), str(script),
        str(tmp_path / "saved"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = read_job(tmp_path / "run")
    first, second = job.attempts
    assert (first.runs[0].laps[-1].end_step, first.runs[0].saved_step) == (7, 3)
    assert (second.runs[0].laps[0].first_step, second.runs[0].laps[-1].end_step) == (4, 9)
    assert first.failed_ns is not None
    assert second.failed_ns is None
    account = shares(job)
    assert sum(account.ranks[0].values()) == job.now_ns
    seconds = {category: ns / 1e9 for category, ns in account.ranks[0].items()}
    # Steps 4, 5 and 6 of the 13, which take 20 ms or more each. The ends of laps are known as
    # ages when a message arrives, so one may be late by a message's delay; the sum above is exact.
    assert seconds[Category.REPEATED] > 0.02
    assert seconds[Category.USEFUL] > seconds[Category.REPEATED]
    assert seconds[Category.RESTART] > 0 < seconds[Category.START_UP]
    (loss,) = account.losses
    assert "SIGKILL" in loss.reason


def test_a_job_whose_launcher_was_killed_has_an_account(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfrom echelon import recorder\n"
        "for number in range(10**9):\n    recorder.step(number)\n    time.sleep(0.01)\n"
    )
    node = Node(tmp_path / "run", [str(script)])
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not _has_begun(tmp_path / "run"):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(30)
        job = read_job(tmp_path / "run")
        assert job.ended_by == ""
        assert sum(shares(job).ranks[0].values()) == job.now_ns
    finally:
        node.close()


def _has_begun(run_dir) -> bool:
    try:
        return bool(read_job(run_dir).attempts)
    except ValueError:
        return False
