"""The contents of notices, and a job that sends them."""

from __future__ import annotations

import json
import textwrap

import pytest

from echelon.launcher.coordinator import observers as o
from echelon.launcher.goodput.book import Book
from echelon.launcher.job.report import Incident
from echelon.launcher.notices.notice import Notices
from echelon.launcher.notices.outside import Outside
from tests.support.ranks import run_echelon


def test_an_incident_a_restart_and_the_end_are_notices(tmp_path):
    notices = Notices("j", "runs/j", "node-a", lambda: 5.0)
    incident = Incident(
        folder=tmp_path / "incident_0", kind="failure", attempt=0, reason="rank 1 was killed",
        verdict={"cause": "dead_process", "culprit_ranks": [1]},
    )  # fmt: skip
    about = {"format": 1, "time_s": 5.0, "job_id": "j", "run_dir": "runs/j", "host": "node-a"}
    known = notices.of(o.VerdictKnown(incident=incident))
    assert known == {
        **about, "event": "incident", "attempt": 0, "kind": "failure",
        "reason": "rank 1 was killed", "folder": "incident_0", "withdrawn": False,
        "verdict": {"cause": "dead_process", "culprit_ranks": [1]}, "root_cause": None,
        "victims": None,
    }  # fmt: skip
    assert notices.of(o.Restarting(attempt=0, decision="restart 1 of 3")) == {
        **about, "event": "restart", "attempt": 0, "decision": "restart 1 of 3", "restarts": 1,
    }  # fmt: skip
    assert notices.of(o.JobEnded(ended_by="worker", exit_code=0, error="")) == {
        **about, "event": "end", "ended_by": "worker", "exit_code": 0, "error": "", "restarts": 1,
    }  # fmt: skip
    assert notices.of(o.StallCleared(attempt=0)) is None


def test_lines_of_receivers_are_printed_by_the_caller_and_a_taken_port_costs_one(tmp_path):
    said = []
    book = Book("j", tmp_path, 5.0, said.append)
    outside = Outside(["exit 3"], ("203.0.113.1", 9), "", str(tmp_path), book, said.append)
    assert said[0].startswith("no metrics at 203.0.113.1 port 9: ")
    outside(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    outside.close()
    assert said[1:] == ["--notify exit: the command ended with exit code 3"]


@pytest.mark.ranks
def test_a_job_that_restarts_sends_verdict_restart_and_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from echelon import recorder
            recorder.step()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("a bad batch")
            """
        )
    )
    got = tmp_path / "notices"
    done = run_echelon(
        "run", "--max-restarts", "1", "--run-dir", str(tmp_path / "run"),
        "--notify", f"cat >> {got}", "--notify", "exit 9", "--metrics", "0", str(script),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notices = [json.loads(line) for line in got.read_text().splitlines()]
    assert sorted(notice["event"] for notice in notices) == ["end", "incident", "restart"]
    by_event = {notice["event"]: notice for notice in notices}
    assert by_event["incident"]["verdict"]["cause"] == "exception"
    assert by_event["restart"]["decision"]
    assert (by_event["end"]["exit_code"], notices[-1]["event"]) == (0, "end")
    assert "metrics at http://127.0.0.1:" in done.stderr
    assert done.stderr.count("--notify exit: the command ended with exit code 9") == 3
