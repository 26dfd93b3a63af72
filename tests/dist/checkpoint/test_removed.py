"""A checkpoint that another job removes while it is loaded: another one is taken."""

from __future__ import annotations

import shutil

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import load, loading, save  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / f"step_{step:08d}", {"step": step, "weight": torch.full((9,), float(step))})
    return tmp_path


def load_while(monkeypatch, folder, happens):
    """Load, and let something happen between the choice of a version and its opening."""
    opened = loading._open

    def open_after(place, state):
        if happens:
            happens.pop()()
        return opened(place, state)

    monkeypatch.setattr(loading, "_open", open_after)
    return load(folder, {"weight": torch.zeros(9)})["step"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_older_one_is_taken(monkeypatch, folder):
    happens = [lambda: shutil.rmtree(folder / "step_00000003")]
    assert load_while(monkeypatch, folder, happens) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_newer_one_is_taken_where_all_others_are_gone(monkeypatch, folder, tmp_path):
    shutil.move(folder / "step_00000003", tmp_path / "later")

    def rotate():
        for step in (1, 2):
            shutil.rmtree(folder / f"step_{step:08d}")
        shutil.move(tmp_path / "later", folder / "step_00000003")

    assert load_while(monkeypatch, folder, [rotate]) == 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_none_left_is_an_error_that_names_the_first(monkeypatch, folder):
    def empty():
        for step in (1, 2, 3):
            shutil.rmtree(folder / f"step_{step:08d}")

    with pytest.raises(CheckpointError, match="step_00000003"):
        load_while(monkeypatch, folder, [empty])
