"""The hosting node's account: the coordinator's reports become facts and a file."""

from __future__ import annotations

import json
import os
import threading

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import observers as o
from echelon.launcher.goodput.accounting import Category
from echelon.launcher.goodput.book import Book
from echelon.launcher.goodput.command import main
from echelon.launcher.goodput.facts import read_job
from echelon.launcher.goodput.shares import shares
from echelon.launcher.job.rundir import ACCOUNT

S = 1_000_000_000
WAIT_S = 60.0


@pytest.fixture
def clock():
    return [1000 * S]


@pytest.fixture
def said():
    return []


@pytest.fixture
def book(tmp_path, clock, said):
    return Book("j", tmp_path, 5.0, said.append, lambda: clock[0])


def _laps(*laps, ranks=()):
    return o.LapsReported(
        node="n", laps=m.Laps(attempt=0, laps=[list(lap) for lap in laps], ranks=list(ranks))
    )


def _begin(book, clock):
    clock[0] += S
    book(o.AttemptBegan(attempt=0, restart=0, hosts={0: "a", 1: "b"}))


def test_laps_of_a_failed_job_are_in_the_file(book, clock, tmp_path):
    _begin(book, clock)
    clock[0] += 4 * S
    book(_laps([0, 0, 3, 3_000_000, 1_000_000, 500_000, 0, 0], ranks=[[0, 3, 900, 2, 0, 0, 0, 0]]))
    clock[0] += S
    book(_laps([0, 3, 4, 2_000_001, 0, 0, 0, 0]))  # its begin differs by a microsecond
    clock[0] += S
    book(o.RankEnded(attempt=0, rank=0, code=-9))
    book(o.IncidentBegan(attempt=0, kind="failure", reason="rank 0 was killed by SIGKILL"))
    clock[0] += S
    book(o.AttemptEnded(attempt=0, failed=True, ended_by="worker"))
    book(o.JobEnded(ended_by="worker", exit_code=137, error=""))
    book.close()
    job = read_job(tmp_path)
    assert (job.ended_by, job.exit_code, job.now_ns) == ("worker", 137, 8 * S)
    run = job.attempts[0].runs[0]
    assert [(lap.began_ns, lap.ended_ns) for lap in run.laps] == [(2 * S, 4 * S), (4 * S, 6 * S)]
    assert (run.step, run.saved_step, run.progress_ns) == (3, 2, 4_100_000_000)
    account = shares(job)
    assert account.ranks[0][Category.WAITING] == S // 2
    assert account.ranks[0][Category.RESTART] == 2 * S
    assert sum(account.ranks[0].values()) == 8 * S


def test_a_stall_begins_with_the_last_sign_of_progress(book, clock):
    _begin(book, clock)
    clock[0] += 20 * S
    book(_laps(ranks=[[0, 3, 9_000, -1, 0, 0, 0, 0], [1, 3, 8_000, -1, 0, 0, 0, 0]]))
    book(o.IncidentBegan(attempt=0, kind="stall", reason="no progress"))
    clock[0] += 2 * S
    book(o.StallCleared(attempt=0))
    assert book.job.attempts[0].stalls == [[13 * S, 23 * S]]


def test_a_full_disk_costs_one_line(clock, said, tmp_path):
    book = Book("j", tmp_path / "gone", 5.0, said.append, lambda: clock[0])
    _begin(book, clock)
    book(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    book.close()
    assert said == ["could not write the account of the job's time: No such file or directory"]
    assert book.job.ended_by == "worker"


def test_report_shows_text_and_json(book, clock, tmp_path, capsys):
    _begin(book, clock)
    clock[0] += 9 * S
    book(_laps([1, 0, 8, 8_000_000, 0, 0, 0, 0]))
    book(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    book.close()
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "job j: 2 ranks, 1 attempt, 10.0 s, ended by worker (0)" in text
    assert "useful " in text
    assert main(["--json", str(tmp_path)]) == 0
    top = json.loads(capsys.readouterr().out)
    assert sum(top["ranks"]["1"].values()) == top["wall_s"] == 10.0
    assert top["ranks"]["1"]["useful"] == 8.0


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 2}', '{"format": 1}', "[" * 100_000, '{"format": 1, "job_id": 5}'],
)
def test_a_damaged_account_is_one_line(text, tmp_path, capsys):
    (tmp_path / ACCOUNT).write_text(text)
    assert main([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("echelon report: ")
    assert err.count("\n") == 1


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert main([os.fspath(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_disk_that_hangs_holds_up_neither_events_nor_the_end(book, clock, said, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(
        "echelon.launcher.goodput.writer.write_job", lambda *_: answers.wait(WAIT_S)
    )
    monkeypatch.setattr("echelon.launcher.goodput.book._CLOSE_S", 0.05)
    _begin(book, clock)
    book(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    book.close()
    assert said == ["could not write the account of the job's time: the disk does not respond"]
    answers.set()


def test_a_machine_that_allows_no_thread_costs_one_line_and_no_time(book, clock, said, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    _begin(book, clock)
    book(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    book.close()
    assert said == ["could not write the account of the job's time: can't start new thread"]


def test_a_loss_that_was_survived_is_shown_and_ends_the_stall_before_it(
    book, clock, tmp_path, capsys
):
    _begin(book, clock)
    clock[0] += 20 * S
    book(o.IncidentBegan(attempt=0, kind="stall", reason="rank 1 is late"))
    clock[0] += 2 * S
    line = "continued without rank 1 (frozen_process), with 1 of 2 ranks in 0.80 s"
    book(o.Continued(attempt=0, line=line))
    book(o.JobEnded(ended_by="worker", exit_code=0, error=""))
    book.close()
    assert read_job(tmp_path).attempts[0].stalls == [[16 * S, 23 * S]]
    assert main([str(tmp_path)]) == 0
    assert f"\nattempt 0 {line}\n" in capsys.readouterr().out
