"""The run directory: nothing is overwritten, and nothing incomplete is shown."""

from __future__ import annotations

import stat

import pytest

from echelon.errors import LaunchError
from echelon.launcher.job.rundir import RunDirectory, write_json


def test_attempts_take_the_next_free_number(tmp_path):
    run = RunDirectory(tmp_path / "run", "")
    assert run.next_attempt() == 0
    run.make_rank_dir(0, 0)
    run.make_rank_dir(11, 4)
    assert RunDirectory(tmp_path / "run", "").next_attempt() == 5


def test_an_incident_is_hidden_until_complete(tmp_path):
    run = RunDirectory(tmp_path / "run", "")
    number, folder = run.open_incident()
    assert folder.name == ".incident_0.partial"
    assert not (run.dump / "latest").exists()
    assert run.open_incident()[0] == 1, "one that was cut off keeps its number"
    final = run.complete_incident(number, folder)
    assert final.name == "incident_0"
    assert (run.dump / "latest").resolve() == final.resolve()


def test_latest_moves_to_the_newest(tmp_path):
    run = RunDirectory(tmp_path / "run", "")
    for _ in range(2):
        run.complete_incident(*run.open_incident())
    assert (run.dump / "latest").readlink().name == "incident_1"


def test_job_files_are_private(tmp_path):
    write_json(tmp_path / "job.json", {"secret": "x"})
    assert stat.S_IMODE((tmp_path / "job.json").stat().st_mode) == 0o600


def test_a_file_in_the_way_is_one_clear_line(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(LaunchError, match=r"--run-dir .*run: File exists"):
        RunDirectory(tmp_path / "run", "")


def test_a_new_job_in_the_directory_forgets_report_and_account_of_the_last_one(tmp_path):
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "goodput.json").write_text("{}")
    directory = RunDirectory(tmp_path, "")
    directory.forget_report()
    directory.forget_report()
    assert list(tmp_path.iterdir()) == []
