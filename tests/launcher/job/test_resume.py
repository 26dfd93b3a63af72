"""Which checkpoint the next attempt resumes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from echelon.launcher.job import resume
from echelon.launcher.job.resume import Checkpoint, Search, newest


def _commit(checkpoint: Path, version: str = "000001") -> Path:
    (checkpoint / version).mkdir(parents=True)
    (checkpoint / version / "commit").touch()
    return checkpoint


def _announce(run: Path, attempt: int, path: Path, step: int | None) -> None:
    folder = run / "rank_0" / f"attempt_{attempt}"
    folder.mkdir(parents=True)
    told = {"format": 1, "path": str(path), "step": step}
    (folder / "checkpoint.json").write_text(json.dumps(told))


def test_the_last_attempt_that_announced_one_counts(tmp_path):
    run = tmp_path / "run"
    assert newest(run, None) is None
    _announce(run, 9, _commit(tmp_path / "a"), 7)
    _announce(run, 10, _commit(tmp_path / "b"), None)
    (run / "rank_0" / "attempt_11").mkdir()
    assert newest(run, None) == Checkpoint(str(tmp_path / "b"))


def test_a_lost_rank_0_has_announced_the_newest_one_until_its_replacement_does(tmp_path):
    run, rank_dir = tmp_path / "run", tmp_path / "run" / "rank_0"
    for number in (0, 1):
        _announce(run, 4, _commit(tmp_path / f"lost_{number}"), number)
        (rank_dir / "attempt_4").rename(rank_dir / f"lost_{number}_of_attempt_4")
    _announce(run, 3, _commit(tmp_path / "a"), 7)
    assert newest(run, None) == Checkpoint(str(tmp_path / "lost_1"), 1)
    _announce(run, 4, _commit(tmp_path / "b"), 9)
    assert newest(run, None) == Checkpoint(str(tmp_path / "b"), 9)


def test_an_announced_checkpoint_that_was_removed_is_passed_over(tmp_path):
    run = tmp_path / "run"
    _announce(run, 0, _commit(tmp_path / "a"), 7)
    _announce(run, 1, tmp_path / "gone", 9)
    _announce(run, 2, tmp_path, 9)  # nothing is committed in it
    assert newest(run, None) == Checkpoint(str(tmp_path / "a"), 7)


@pytest.mark.parametrize("text", ["", "[]", '{"path": 3}', '{"step": 1}'])
def test_an_announcement_that_was_cut_short_is_passed_over(tmp_path, text):
    _announce(tmp_path, 0, tmp_path, 1)
    (tmp_path / "rank_0" / "attempt_0" / "checkpoint.json").write_text(text)
    assert newest(tmp_path, None) is None


def test_a_given_folder_beats_what_was_announced(tmp_path):
    run, given = tmp_path / "run", tmp_path / "given"
    _announce(run, 0, _commit(tmp_path / "a"), 7)
    assert newest(run, given) is None
    given.mkdir()
    (given / "step_00000300" / "000001").mkdir(parents=True)  # never committed
    _commit(given / "step_00000020")
    _commit(given / "step_00000100")
    assert newest(run, given) == Checkpoint(str(given / "step_00000100"), 100)
    _commit(given)
    assert newest(run, given) == Checkpoint(str(given))


def test_a_file_system_that_hangs_delays_an_attempt_and_keeps_the_last_answer(
    tmp_path, monkeypatch
):
    said: list[str] = []
    search = Search(tmp_path, _commit(tmp_path / "a"), said.append)
    search.begin(0.0)
    assert search._thread is not None
    search._thread.join(60)
    assert search.found == Checkpoint(str(tmp_path / "a"))
    assert search.is_over(0.0)
    hangs = threading.Event()
    monkeypatch.setattr(resume, "newest", lambda *_: hangs.wait(60) and None)
    search.begin(1.0)
    try:
        assert not search.is_over(1.0 + resume.SEARCH_S - 0.1)
        assert search.is_over(1.0 + resume.SEARCH_S)
        assert search.found == Checkpoint(str(tmp_path / "a"))
    finally:
        hangs.set()
    (line,) = said
    assert line.startswith("cannot look for checkpoints (no answer within 60 s)")
    assert line.endswith(f"ECHELON_RESUME is {tmp_path / 'a'} as before")


def test_a_folder_that_cannot_be_read_is_reported(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    said: list[str] = []
    monkeypatch.setattr(resume, "newest", fail)
    search = Search(tmp_path, tmp_path, said.append)
    search.begin(0.0)
    assert search._thread is not None
    search._thread.join(60)
    assert search.is_over(0.0)
    assert "Input/output error" in said[0]
    assert search.found is None


def test_where_nothing_was_announced_no_attempt_waits(tmp_path):
    search = Search(tmp_path, None, lambda _: None)
    search.begin(0.0)
    assert (search._thread, search.found) == (None, None)
    assert search.is_over(0.0)
