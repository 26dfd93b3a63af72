"""A checkpoint's folder may hold what other programs put there: a save leaves it alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.checkpoint.disk import files  # noqa: E402
from echelon.dist.checkpoint.disk.folder import COMMIT, Unfinished, versions  # noqa: E402


def content(folder):
    """Return every file and link below a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_folders_of_others_with_numbers_for_names_stay_as_they_are(tmp_path):
    """Data sets and other tools number their folders too, some with a file named commit."""
    foreign = tmp_path / "c"
    for name in ("000001/image.png", "000002/below/image.png", "000003/commit", "000004/manifest"):
        (foreign / name).parent.mkdir(parents=True)
        (foreign / name).write_text(name)
    (foreign / "000004/notes.txt").write_text("mine")
    (foreign / "000005").mkdir()
    (foreign / "000006").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (foreign / "000007").symlink_to(tmp_path / "elsewhere")
    before = content(foreign)
    for step in range(3):
        save(foreign, {"step": step}, keep=1)
    after = content(foreign)
    assert {name: after.get(name) for name in before} == before
    assert (foreign / "000005").is_dir()
    assert [version.name for version in versions(foreign)] == ["000010"]
    assert load(foreign, {})["step"] == 2


def test_a_save_that_was_killed_before_its_commit_mark_is_still_removed(tmp_path):
    save(tmp_path, {"step": 1})
    (tmp_path / "000001" / COMMIT).unlink()
    save(tmp_path, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]


def test_a_version_that_another_job_commits_while_it_is_removed_is_kept(tmp_path, monkeypatch):
    """Two jobs save into one folder: the second looks, then the first commits."""
    save(tmp_path, {"step": 1})
    mark = (tmp_path / "000001" / COMMIT).read_bytes()
    (tmp_path / "000001" / COMMIT).unlink()
    rename, committed = files.set_aside, []

    def set_aside(path):
        if path.name == "000001" and not committed:
            (path / COMMIT).write_bytes(mark)
            committed.append(path)
        return rename(path)

    monkeypatch.setattr(files, "set_aside", set_aside)
    Unfinished.create(tmp_path).discard()
    assert committed
    assert [version.name for version in versions(tmp_path)] == ["000001"]
    assert load(tmp_path, {})["step"] == 1
