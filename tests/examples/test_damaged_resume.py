"""--resume auto on a damaged folder: an older checkpoint, or one line; on all ranks alike."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.examples.in_process import train, train_gpt
from tests.examples.runs import read_log
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000)))
    return path


@pytest.fixture(scope="module")
def original(text, tmp_path_factory):
    """Checkpoints after 2, 4 and 6 steps."""
    folder = tmp_path_factory.mktemp("original") / "gpt"
    code, told = train("--steps=6", "--data", text, "--checkpoint", folder, *EVERY)
    assert code == 0, told
    assert len(list(folder.glob("step_*"))) == 3
    return folder


# Without patience, a save waits for the one before: with it, a slow disk would skip checkpoints.
EVERY = ("--checkpoint-every=2", "--keep=3", "--set", "checkpoint.patience_s=0")


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "gpt")
    return tmp_path / "gpt"


def file_of(folder, step, name):
    return folder / f"step_{step:08d}" / "000001" / name


def cut(folder, step):
    path = file_of(folder, step, "rank_00000.bin")
    os.truncate(path, path.stat().st_size - 1)


def flip(folder, step):
    path = file_of(folder, step, "rank_00000.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tear(folder, step):
    file_of(folder, step, "manifest").write_bytes(b"torn")


def remove_half(folder, step):
    file_of(folder, step, "manifest").unlink()
    file_of(folder, step, "rank_00000.bin").unlink()


DAMAGES = [cut, flip, tear, remove_half]


def resume(folder, text, *arguments):
    """Go on to step 7; return also the first step that was taken, 0 if there was none."""
    options = ("--steps=7", "--data", text, "--checkpoint", folder, "--resume=auto")
    log = folder.parent / "log"
    code, told = train(*options, "--log", log, *arguments)
    steps = [line["step"] for line in read_log(log) if "loss" in line] if log.exists() else []
    return code, told, min(steps, default=0)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_older_one_is_taken_with_one_line(damage, folder, text):
    damage(folder, 6)
    code, told, first = resume(folder, text)
    assert code == 0, told
    assert first == 5
    lines = [line for line in told.splitlines() if line.startswith("warning: ")]
    assert len(lines) == (damage is not remove_half), told
    assert all("step_00000006" in line and "instead" in line for line in lines)
    assert "Traceback" not in told


@pytest.mark.parametrize("damage", [flip, tear])
def test_a_run_does_not_begin_again_where_all_are_damaged(damage, folder, text):
    for step in (2, 4, 6):
        damage(folder, step)
    code, told, first = resume(folder, text)
    assert (code, first) == (2, 0), told
    errors = [line for line in told.splitlines() if "error: " in line]
    assert len(errors) == 1, told
    assert "Traceback" not in told


def test_the_checkpoint_of_another_job_is_refused_in_one_line(folder, text):
    code, told, first = resume(folder, text, "--seed=1")
    assert (code, first) == (2, 0)
    assert "belongs to another run: seed 0 there, 1 here" in told.splitlines()[-1]


def test_an_older_checkpoint_of_another_job_is_refused_too(folder, original, text, tmp_path):
    """The newest is of this run, but torn; what is read then is of another."""
    code, told = train("--steps=7", "--seed=1", "--data", text, "--checkpoint", tmp_path / "other")
    assert code == 0, told
    for step in (2, 4, 6):
        shutil.rmtree(folder / f"step_{step:08d}")
    shutil.copytree(original / "step_00000006", folder / "step_00000005")
    shutil.copytree(tmp_path / "other/step_00000007", folder / "step_00000007")
    flip(folder, 7)
    code, told, first = resume(folder, text, "--seed=1")
    assert (code, first) == (2, 0), told
    assert "the position was saved with seed 0, but this loader has 1" in told.splitlines()[-1]


def test_an_empty_folder_is_a_beginning(text, tmp_path):
    (tmp_path / "gpt").mkdir()
    code, told, first = resume(tmp_path / "gpt", text)
    assert code == 0, told
    assert first == 1
    assert (tmp_path / "gpt/step_00000007").is_dir()


def test_a_store_that_does_not_answer_is_one_line_and_not_a_beginning(folder, text, monkeypatch):
    def down(path):
        raise OSError(f"{path}: cannot list within 60 s")

    monkeypatch.setattr(train_gpt, "peek", down)
    code, told, first = resume(folder, text)
    assert (code, first) == (2, 0), told
    assert "cannot list within 60 s" in told.splitlines()[-1]
    assert "Traceback" not in told


def test_a_run_goes_on_from_an_object_store(text, tmp_path):
    pytest.importorskip("fsspec")
    files = ("--data", text, "--checkpoint", f"file://{tmp_path}/gpt", "--resume=auto")
    for steps in (2, 4):
        code, told = train(f"--steps={steps}", *files, "--log", tmp_path / f"log_{steps}")
        assert code == 0, told
    assert min(line["step"] for line in read_log(tmp_path / "log_4") if "loss" in line) == 3


def _rank(rank, world_size, folder, text):
    return resume(folder, text)


def test_all_ranks_take_the_same_older_one(folder, text):
    """Only the rank that reads the damaged block finds it."""
    flip(folder, 6)
    ended = run_ranks(_rank, 2, folder, text, timeout_s=60)
    assert [code for code, *_ in ended] == [0, 0], ended
    assert ended[0][2] == 5
    assert all("Traceback" not in told for _, told, _ in ended)


@pytest.mark.slow
def test_all_ranks_refuse_alike(folder, text):
    for step in (2, 4, 6):
        flip(folder, step)
    ended = run_ranks(_rank, 2, folder, text, timeout_s=60)
    assert [code for code, *_ in ended] == [2, 2], ended
    assert all(told.count("error: ") == 1 and "Traceback" not in told for _, told, _ in ended)
