"""A save that outlived its time, or its job, can neither touch nor replace a later one."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.checkpoint.disk import files  # noqa: E402
from echelon.dist.checkpoint.disk.folder import Unfinished, versions  # noqa: E402
from echelon.dist.checkpoint.disk.manifest import Manifest  # noqa: E402
from echelon.dist.checkpoint.disk.rank_file import RankFileWriter  # noqa: E402
from echelon.dist.checkpoint.disk.source import Version  # noqa: E402
from echelon.dist.checkpoint.ranks import pending as background  # noqa: E402
from echelon.dist.checkpoint.state.held import Held  # noqa: E402
from echelon.dist.checkpoint.state.plain import TensorAt, pack  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402

STEPS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")
WRITING = 11  # calls of a rank's file and its index; those of the commit follow


def state_of(step):
    return {"weight": torch.full((1000,), float(step)), "step": step}


def check_whole(path):
    """Every version that counts is undamaged and of one step; return their steps."""
    steps = []
    for version in versions(path):
        source = Version(version)
        source.verify()
        source.close()
        state = load(version, state_of(0))
        assert state["weight"].unique().tolist() == [float(state["step"])]
        steps.append(state["step"])
    return steps


class Hang:
    """A disk that stands still at the n-th call of the background thread, until released."""

    def __init__(self, monkeypatch, moment):
        self.reached = threading.Event()
        self.released = threading.Event()
        self._moment = moment
        self._count = 0
        for name in STEPS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call):
        def held_back(*args, **kwargs):
            if threading.current_thread().name == "echelon-checkpoint":
                self._count += 1
                if self._count == self._moment:
                    self.reached.set()
                    assert self.released.wait(30)
            return call(*args, **kwargs)

        return held_back


@pytest.mark.parametrize("moment", [1, 2, 4, 6, 8, 12, 16, 20])
def test_a_save_that_hangs_is_never_forgotten_and_never_damages_a_later_one(
    tmp_path, monkeypatch, moment
):
    monkeypatch.setattr(background, "_GRACE_S", 0.0)
    path = tmp_path / "c"
    save(path, state_of(1))
    with monkeypatch.context() as patched:
        hang = Hang(patched, moment)
        limit_s = 0.05 if moment < WRITING else 60.0  # a commit begins within the limit only
        pending = save(path, state_of(2), async_op=True, timeout_s=limit_s)
        try:
            assert hang.reached.wait(30)
            pending._timeout_s = 0.05
            for _ in range(3):  # as long as the thread lives, not only the first time
                with pytest.raises(CheckpointError, match="still being saved"):
                    save(path, state_of(3))
            assert check_whole(path)[0] == 1
        finally:
            hang.released.set()
            pending._thread.join(30)
    if moment < WRITING:
        with pytest.raises(CheckpointError, match="not saved within"):
            pending.wait()
        assert check_whole(path) == [1]
    else:  # it was committing already: late, and whole
        pending.wait()
        assert check_whole(path) == [1, 2]
    save(path, state_of(4))
    assert check_whole(path)[-1] == 4
    assert load(path, state_of(0))["step"] == 4
    assert not [p.name for p in path.iterdir() if p.name.startswith(".")]


def write_part(unfinished, step):
    """Write what a world of one would, up to the commit."""
    writer = RankFileWriter(unfinished.path, 0)
    writer.append(Held("weight", (1000,), torch.full((1000,), float(step))))
    part = Manifest(
        world_size=1,
        save=unfinished.token,
        kinds={"weight": "value", "step": "value"},
        tensors=writer.tensors,
        values={
            "weight": pack(TensorAt("weight"), "weight"),
            "step": pack(step, "step"),
        },
        files={0: writer.finish()},
    )
    unfinished.add_index(0, part)


def test_a_writer_of_an_earlier_job_cannot_write_into_the_folder_of_a_later_one(tmp_path):
    """It still holds the path that its job made when the new job's save begins."""
    path = tmp_path / "c"
    save(path, state_of(1))
    stale = Unfinished.create(path)
    fresh = Unfinished.create(path)
    assert stale.path != fresh.path
    assert not stale.path.exists()
    with pytest.raises(OSError, match="No such file"):
        write_part(stale, 2)
    write_part(fresh, 3)
    with pytest.raises(OSError, match="No such file"):
        stale.add_failure(0, "late")
    fresh.commit(1, keep=2)
    assert [version.name for version in versions(path)] == ["000001", fresh.final.name]
    assert Version(path).verify() == 4000


def test_a_commit_that_was_superseded_fails_and_touches_nothing(tmp_path, monkeypatch):
    """Whatever step of its commit the stale writer stands at when the next save begins."""
    num_calls = 0
    for moment in range(40):
        path = tmp_path / str(moment)
        save(path, state_of(1))
        stale = Unfinished.create(path)
        write_part(stale, 2)
        count = 0

        def superseded(call, path=path, moment=moment):
            def counted(*args, **kwargs):
                nonlocal count
                count += 1
                if count == moment + 1:
                    monkeypatch.undo()
                    save(path, state_of(3))
                return call(*args, **kwargs)

            return counted

        for name in STEPS:
            monkeypatch.setattr(os, name, superseded(getattr(os, name)))
        with contextlib.suppress(OSError, CheckpointError):
            stale.commit(1, keep=2)
        monkeypatch.undo()
        if count <= moment:
            num_calls = count
            break
        for version in versions(path):
            source = Version(version)
            source.verify()
            source.close()
        assert load(path, {"weight": None})["weight"].unique().tolist() in ([2.0], [3.0])
        assert 3.0 in {
            load(version, {"weight": None})["weight"][0].item() for version in versions(path)
        }
    assert num_calls >= 12, num_calls


def test_an_index_of_another_save_is_refused(tmp_path):
    unfinished = Unfinished.create(tmp_path / "c")
    writer = RankFileWriter(unfinished.path, 0)
    part = Manifest(world_size=1, save="0123456789abcdef", files={0: writer.finish()})
    unfinished.add_index(0, part)
    with pytest.raises(CheckpointError, match="belongs to another save"):
        unfinished.commit(1, keep=1)
    assert not versions(tmp_path / "c")


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_nothing_is_committed_or_pruned_before_the_files_are_seen_to_be_whole(tmp_path, change):
    path = tmp_path / "c"
    save(path, state_of(1))
    unfinished = Unfinished.create(path)
    write_part(unfinished, 2)
    file = unfinished.path / "rank_00000.bin"
    if change == "cut":
        os.truncate(file, 100)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"rank_00000.bin"):
        unfinished.commit(1, keep=1)
    assert check_whole(path) == [1]


def test_a_version_whose_mark_cannot_be_read_is_not_swept_away(tmp_path, monkeypatch):
    """An input/output error is no proof that a version was never committed."""
    path = tmp_path / "c"
    save(path, state_of(1))
    read_bytes = Path.read_bytes

    def failing(file):
        if file.name == "commit":
            raise OSError(5, "Input/output error")
        return read_bytes(file)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing)
        Unfinished.create(path)
    assert check_whole(path) == [1]


def test_removing_a_folder_takes_its_name_away_first(tmp_path, monkeypatch):
    """A writer that comes in the middle finds no folder to write to."""
    folder = tmp_path / "000001"
    folder.mkdir()
    (folder / "commit").write_bytes(b"x")
    unlink = os.unlink

    def look(path, *args, **kwargs):
        assert not folder.exists()
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", look)
    files.remove_folder(folder)
    assert not list(tmp_path.iterdir())
