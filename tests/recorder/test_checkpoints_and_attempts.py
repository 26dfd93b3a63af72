"""What a rank announces to its launcher, and what it learns of earlier attempts."""

from __future__ import annotations

import json

import pytest

from echelon import recorder
from echelon.recorder.checkpoints import note_checkpoint


@pytest.fixture
def rank_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_RANK_DIR", str(tmp_path))
    monkeypatch.setattr("echelon.recorder.checkpoints.current", lambda: None)
    return tmp_path


def test_a_committed_checkpoint_is_announced_with_its_step(rank_dir, tmp_path):
    for path, step, expected in (("gpt", 7, 7), ("gpt", None, None), ("step_00000300", 7, 300)):
        note_checkpoint(tmp_path / path, step)
        told = json.loads((rank_dir / "checkpoint.json").read_text())
        assert told == {"format": 1, "path": str(tmp_path / path), "step": expected}
    assert [path.name for path in rank_dir.iterdir()] == ["checkpoint.json"]


def test_a_checkpoint_is_not_harmed_where_it_cannot_be_announced(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_RANK_DIR", str(tmp_path / "gone"))
    note_checkpoint(tmp_path, 1)
    monkeypatch.delenv("ECHELON_RANK_DIR")
    note_checkpoint(tmp_path, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"attempts": [{"last_step": 5}, {"last_step": 57}, {"last_step": null}]}', 57),
        ('{"attempts": []}', None),
        ('{"attempts": [3]}', None),
        ("", None),
        ("[]", None),
    ],
)
def test_the_last_step_of_earlier_attempts(rank_dir, tmp_path, monkeypatch, text, expected):
    (tmp_path / "attempts.json").write_text(text)
    monkeypatch.setenv("ECHELON_ATTEMPTS", str(tmp_path / "attempts.json"))
    assert recorder.last_step() == expected


def test_the_own_step_counts_once_there_is_one(rank_dir, monkeypatch):
    class _Recorder:
        step_number = 3

    monkeypatch.setattr("echelon.recorder.checkpoints.current", _Recorder)
    assert recorder.last_step() == 3
