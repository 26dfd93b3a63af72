"""What a keeper keeps, what it never removes, and what a failing disk does to training."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import Keeper, load, newest, peek, save  # noqa: E402
from echelon.dist.checkpoint.disk import claim, files  # noqa: E402
from echelon.dist.checkpoint.disk.source import Version  # noqa: E402
from echelon.dist.checkpoint.ranks import pending  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


def state_at(step):
    return {"weight": torch.full((100,), float(step)), "step": step}


def steps_in(folder):
    return [int(path.name.removeprefix("step_")) for path in sorted(folder.glob("step_*"))]


def loaded(path):
    state = load(path, state_at(-1))
    assert state["weight"].unique().tolist() == [float(state["step"])]
    return state["step"]


def keep_all(folder, steps, **settings):
    with Keeper(folder, **settings) as keeper:
        for step in steps:
            assert keeper.save(step, state_at(step))


def data_of(folder, step):
    return next((folder / f"step_{step:08d}").glob("0*/rank_00000.bin"))


@pytest.mark.parametrize("async_op", [False, True])
def test_the_last_every_kth_and_the_best_are_kept(tmp_path, async_op):
    scores = {10: 5.0, 20: 3.0, 30: 1.0, 40: 2.0}
    with Keeper(tmp_path, keep=2, keep_every=40, best="lowest") as keeper:
        for step in range(10, 100, 10):
            assert keeper.save(step, state_at(step), async_op=async_op, score=scores.get(step))
        assert keeper.wait()
    assert steps_in(tmp_path) == [30, 40, 80, 90]
    assert newest(tmp_path) == tmp_path / "step_00000090"
    assert loaded(tmp_path) == loaded(newest(tmp_path)) == peek(tmp_path)["step"] == 90
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [
        ".keeper"
    ]


def test_a_new_job_keeps_what_the_one_before_has_kept(tmp_path):
    keep_all(tmp_path, [1, 2, 3], keep=2)
    keep_all(tmp_path, [4], keep=2)
    assert steps_in(tmp_path) == [3, 4]


def test_newest_passes_over_damaged_and_half_written_ones_with_a_line_each(tmp_path):
    keep_all(tmp_path, [1, 2, 3], keep=3)
    data = data_of(tmp_path, 3)
    data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "step_00000004" / ".000001-aa.tmp").mkdir(parents=True)
    with pytest.warns(RuntimeWarning) as caught:
        assert newest(tmp_path) == tmp_path / "step_00000002"
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2, texts
    assert "step_00000004: never completed; not loaded" in texts[0]
    assert "399 bytes, but 400 were written; not loaded" in texts[1]


def test_load_takes_an_older_step_if_what_the_newest_holds_is_damaged(tmp_path):
    keep_all(tmp_path, [1, 2], keep=2)
    data = bytearray(data_of(tmp_path, 2).read_bytes())
    data[5] ^= 1
    data_of(tmp_path, 2).write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"damaged.*; loading .*step_00000001/000001 instead"):
        assert loaded(tmp_path) == 1


def test_newest_of_a_single_checkpoint_and_of_nothing(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None
    save(tmp_path / "c", state_at(1))
    assert newest(tmp_path / "c") == tmp_path / "c"
    assert newest(tmp_path / "c" / "000001") == tmp_path / "c" / "000001"
    (tmp_path / "c" / "000001" / "commit").unlink()
    assert newest(tmp_path / "c") is None


def test_what_is_being_read_is_not_removed(tmp_path):
    with Keeper(tmp_path, keep=1) as keeper:
        keeper.save(1, state_at(1))
        reader = Version(tmp_path)
        why = "step_00000001 was not removed: the checkpoint is being read"
        with pytest.warns(RuntimeWarning, match=why):
            keeper.save(2, state_at(2))
        assert steps_in(tmp_path) == [1, 2]
        assert reader.verify() == 400
        reader.close()
        keeper.save(3, state_at(3))
    assert steps_in(tmp_path) == [3]


def test_an_older_version_that_is_being_read_is_not_removed_either(tmp_path):
    save(tmp_path, state_at(1), keep=1)
    reader = Version(tmp_path)
    save(tmp_path, state_at(2), keep=1)
    assert reader.verify() == 400
    reader.close()
    save(tmp_path, state_at(3), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]


def test_what_the_keeper_did_not_write_stays(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step_final").mkdir()
    target = tmp_path / "elsewhere"
    keep_all(target, [2])
    (tmp_path / "step_00000002").symlink_to(target / "step_00000002")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keep_all(tmp_path, [3, 4], keep=1)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2, texts
    assert all(
        "not removed: the folder contains files that no save wrote" in text for text in texts
    )
    assert (tmp_path / "step_00000001" / "notes.txt").exists()
    assert loaded(tmp_path / "step_00000002") == 2
    assert (tmp_path / "step_final").exists()
    assert not (tmp_path / "step_00000003").exists()


def test_a_half_written_step_goes_with_the_next_save(tmp_path):
    half = tmp_path / "step_00000009" / ".000001-0123.tmp"
    half.mkdir(parents=True)
    (half / "rank_00000.bin").write_bytes(b"x")
    keep_all(tmp_path, [1])
    assert steps_in(tmp_path) == [1]


def test_a_run_that_was_taken_back_is_told_and_saved(tmp_path):
    keep_all(tmp_path, [10, 20], keep=1)
    with pytest.warns(RuntimeWarning, match="step 5 is saved beside step 20"):
        keep_all(tmp_path, [5], keep=1)
    assert steps_in(tmp_path) == [5, 20]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"keep": 0}, "keep"),
        ({"keep_every": 0}, "keep_every"),
        ({"best": "loss"}, "best"),
        ({"patience_s": -1.0}, "patience_s"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, word):
    with pytest.raises(ValueError, match=word):
        Keeper(tmp_path, **settings)


def test_an_address_whose_package_is_missing_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    for call in (Keeper, lambda path: save(path, state_at(1)), newest, peek):
        with pytest.raises(
            ValueError, match=r"^s3://\.\.\.: fsspec is not installed\. Run pip"
        ) as caught:
            call("s3://key:secret@bucket/c")
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_bad_steps_and_states_are_refused(tmp_path):
    with Keeper(tmp_path) as keeper:
        for step in (-1, 1.5, True):
            with pytest.raises(ValueError, match="step"):
                keeper.save(step, state_at(1))
        with pytest.raises(TypeError):
            keeper.save(1, {"x": object()})
        with pytest.raises(ValueError, match="loss"):
            keeper.save(1, state_at(1), score="loss")


# ---- disks that fail ----


def _fill(monkeypatch, folder, *, room_for):
    """Have every file of data fail while `folder` has more than so many steps."""
    real = files.NewFile.write

    def write(self, data):
        if self.path.name.endswith(".bin") and len(steps_in(folder)) > room_for:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(files.NewFile, "write", write)


def test_a_full_disk_is_one_line_and_removes_nothing(tmp_path, monkeypatch):
    with Keeper(tmp_path, keep=3) as keeper:
        assert keeper.save(1, state_at(1))
        assert keeper.save(2, state_at(2))
        _fill(monkeypatch, tmp_path, room_for=2)
        with pytest.warns(RuntimeWarning) as caught:
            assert not keeper.save(3, state_at(3))
    (line,) = [str(one.message) for one in caught]
    assert "step 3 not saved" in line
    assert "No space left on device" in line
    assert "newest complete checkpoint: step 2" in line
    assert loaded(tmp_path) == 2
    assert loaded(tmp_path / "step_00000001") == 1


def test_a_full_disk_in_the_background_is_told_by_the_next_call(tmp_path, monkeypatch):
    with Keeper(tmp_path) as keeper:
        assert keeper.save(1, state_at(1))
        _fill(monkeypatch, tmp_path, room_for=1)
        assert keeper.save(2, state_at(2), async_op=True)
        with pytest.warns(RuntimeWarning, match=r"step 2 not saved.*No space left"):
            assert not keeper.wait()
        assert keeper.wait()
    assert loaded(tmp_path) == 1


def test_room_is_made_only_if_asked_and_never_of_the_newest_or_the_best(tmp_path, monkeypatch):
    with Keeper(tmp_path, keep=9, best="lowest", make_room=True) as keeper:
        for step in (1, 2, 3):
            assert keeper.save(step, state_at(step), score=float(step))
        _fill(monkeypatch, tmp_path, room_for=3)
        with pytest.warns(RuntimeWarning, match="step_00000002: removed because the disk is full"):
            assert keeper.save(4, state_at(4))
        assert steps_in(tmp_path) == [1, 3, 4]
        _fill(monkeypatch, tmp_path, room_for=0)
        with pytest.warns(RuntimeWarning, match="step 5 not saved"):
            assert not keeper.save(5, state_at(5))
    assert {1, 4} <= set(steps_in(tmp_path))
    assert loaded(tmp_path) == 4


# ---- disks that are slow ----


def _hold_writes(monkeypatch):
    """Have every file of data wait; return the event that releases the waiting files."""
    real, released = files.NewFile.write, threading.Event()

    def write(self, data):
        if self.path.name.endswith(".bin"):
            assert released.wait(60)
        real(self, data)

    monkeypatch.setattr(files.NewFile, "write", write)
    return released


def test_a_slow_disk_skips_checkpoints_instead_of_stopping_the_training(tmp_path, monkeypatch):
    with Keeper(tmp_path, patience_s=60) as keeper:
        assert keeper.save(1, state_at(1))
        released = _hold_writes(monkeypatch)
        assert keeper.save(2, state_at(2), async_op=True)
        with pytest.warns(RuntimeWarning) as caught:
            saved = [keeper.save(step, state_at(step), async_op=True) for step in (3, 4)]
        assert saved == [False, False]
        released.set()
        assert keeper.wait()
        assert keeper.save(5, state_at(5), async_op=True)
        assert keeper.wait()
    first, second = [str(one.message) for one in caught]
    assert "step 3 not saved: step 2 is still being written after" in first
    assert "newest complete checkpoint: step 1" in first
    assert "step 4 not saved" in second
    assert steps_in(tmp_path) == [1, 2, 5]
    assert loaded(tmp_path) == 5


def test_a_save_in_the_foreground_is_never_skipped(tmp_path, monkeypatch):
    with Keeper(tmp_path, patience_s=60) as keeper:
        released = _hold_writes(monkeypatch)
        assert keeper.save(1, state_at(1), async_op=True)
        threading.Timer(0.1, released.set).start()
        assert keeper.save(2, state_at(2))
    assert steps_in(tmp_path) == [1, 2]


def test_without_patience_a_write_is_waited_for(tmp_path, monkeypatch):
    with Keeper(tmp_path) as keeper:
        released = _hold_writes(monkeypatch)
        assert keeper.save(1, state_at(1), async_op=True)
        threading.Timer(0.1, released.set).start()
        assert keeper.save(2, state_at(2), async_op=True)
        assert keeper.wait()
    assert steps_in(tmp_path) == [1, 2]


# ---- writes that hang ----


class _HungSteps:
    """A disk on which the writes of some steps hang until they are released."""

    def __init__(self, monkeypatch, *steps):
        self.released = {step: threading.Event() for step in steps}
        real = files.NewFile.write

        def write(new_file, data):
            step = int(new_file.path.parts[-3].removeprefix("step_"))
            if step in self.released and new_file.path.name.endswith(".bin"):
                assert self.released[step].wait(60)
            real(new_file, data)

        monkeypatch.setattr(files.NewFile, "write", write)


def _writing_threads():
    return [thread for thread in threading.enumerate() if thread.name == "echelon-checkpoint"]


@pytest.mark.parametrize("async_op", [True, False])
def test_a_write_beyond_the_patience_is_superseded_and_completed_if_it_ends(
    tmp_path, monkeypatch, async_op
):
    disk = _HungSteps(monkeypatch, 1)
    with Keeper(tmp_path, keep=1, patience_s=1e-6) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (hung,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 is still being written.*step 2 is saved"):
            assert keeper.save(2, state_at(2), async_op=async_op)
        assert keeper.wait()
        assert newest(tmp_path) == tmp_path / "step_00000002"
        assert steps_in(tmp_path) == [1, 2]  # what is being written is not removed
        disk.released[1].set()
        hung.join(60)
        assert loaded(tmp_path / "step_00000001") == 1
        assert loaded(tmp_path) == 2
        assert keeper.save(3, state_at(3))
    assert steps_in(tmp_path) == [3]


def test_a_superseded_write_does_not_remove_the_one_that_superseded_it(tmp_path, monkeypatch):
    disk = _HungSteps(monkeypatch, 1, 2)
    with Keeper(tmp_path, keep=1, patience_s=1e-6) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (first,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 is still being written"):
            assert keeper.save(2, state_at(2), async_op=True)
        disk.released[1].set()
        first.join(60)
        assert (tmp_path / "step_00000001" / "000001" / "commit").exists()
        disk.released[2].set()
        assert keeper.wait()
    assert loaded(tmp_path) == 2


def test_if_the_next_write_hangs_as_well_it_is_waited_for(tmp_path, monkeypatch):
    disk = _HungSteps(monkeypatch, 1, 2)
    with Keeper(tmp_path, patience_s=1e-6) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (first,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 is still being written"):
            assert keeper.save(2, state_at(2), async_op=True)
        threading.Timer(0.1, disk.released[2].set).start()
        assert keeper.save(3, state_at(3), async_op=True)
        assert first.is_alive()
        assert (tmp_path / "step_00000002" / "000001" / "commit").exists()
        assert keeper.wait()
        disk.released[1].set()
        first.join(60)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_the_launcher_is_not_sent_back_to_a_superseded_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_RANK_DIR", str(tmp_path))
    disk = _HungSteps(monkeypatch, 1)
    with Keeper(tmp_path / "saved", patience_s=1e-6) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (first,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 is still being written"):
            assert keeper.save(2, state_at(2))
        disk.released[1].set()
        first.join(60)
    assert loaded(tmp_path / "saved" / "step_00000001") == 1
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 2


def test_only_the_writes_of_the_keeper_are_superseded(tmp_path, monkeypatch):
    released = _hold_writes(monkeypatch)
    save(tmp_path / "final", state_at(9), async_op=True)
    with Keeper(tmp_path / "kept", patience_s=1e-6) as keeper:
        threading.Timer(0.1, released.set).start()
        assert keeper.save(1, state_at(1))
    assert loaded(tmp_path / "final") == 9


def test_the_failure_of_a_superseded_write_is_told(tmp_path, monkeypatch):
    disk = _HungSteps(monkeypatch, 1)
    with Keeper(tmp_path, patience_s=1e-6) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (hung,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 is still being written"):
            assert keeper.save(2, state_at(2))
        monkeypatch.setattr(files.NewFile, "sync", _fail)
        disk.released[1].set()
        hung.join(60)
        monkeypatch.undo()
        with pytest.warns(RuntimeWarning, match=r"step 1 not saved: rank 0 failed: OSError.*EIO"):
            assert keeper.wait()
        assert keeper.save(3, state_at(3))
    assert loaded(tmp_path) == 3


def _fail(self):
    raise OSError(errno.EIO, "EIO")


def test_a_write_that_outlives_its_keeper_removes_nothing(tmp_path, monkeypatch):
    disk = _HungSteps(monkeypatch, 1, 5)
    keeper = Keeper(tmp_path, keep=1, patience_s=1e-6)
    assert keeper.save(1, state_at(1), async_op=True)
    (hung,) = _writing_threads()
    with pytest.warns(RuntimeWarning, match="step 1 is still being written"):
        assert keeper.save(2, state_at(2))
    keeper.close()
    with Keeper(tmp_path) as other:
        assert other.save(5, state_at(5), async_op=True)
        disk.released[1].set()
        hung.join(60)
        assert steps_in(tmp_path) == [1, 2, 5]
        disk.released[5].set()
        assert other.wait()
    assert loaded(tmp_path) == 5


def test_room_is_not_made_of_what_is_being_written(tmp_path, monkeypatch):
    disk = _HungSteps(monkeypatch, 1)
    with Keeper(tmp_path, patience_s=1e-6, make_room=True) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (hung,) = _writing_threads()
        monkeypatch.setattr(files.NewFile, "sync", _full_for_step_2)
        with pytest.warns(RuntimeWarning, match="step 2 not saved"):
            assert not keeper.save(2, state_at(2))
        assert steps_in(tmp_path) == [1, 2]
        disk.released[1].set()
        hung.join(60)
    assert loaded(tmp_path) == 1


def _full_for_step_2(self):
    if "step_00000002" in self.path.parts:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_patience_is_longer_than_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(pending, "_GRACE_S", 0.0)
    disk = _HungSteps(monkeypatch, 1)
    with Keeper(tmp_path, patience_s=math.inf, timeout_s=0.1) as keeper:
        assert keeper.save(1, state_at(1), async_op=True)
        (hung,) = _writing_threads()
        with pytest.warns(RuntimeWarning, match="step 1 not saved: .*still being saved after"):
            keeper.save(2, state_at(2))
        disk.released[1].set()
        hung.join(60)


_HANG_AND_END = """
import os, sys, threading, warnings, torch
from echelon.dist.checkpoint import Keeper
from echelon.dist.checkpoint.disk import files
warnings.simplefilter("ignore")
keeper = Keeper(sys.argv[1], patience_s=1e-6)
real = files.NewFile.write
def write(self, data):
    if "step_00000001" in self.path.parts:
        threading.Event().wait()
    real(self, data)
files.NewFile.write = write
for step in (1, 2):
    assert keeper.save(step, {"step": step}, async_op=True)
"""


def test_a_program_whose_superseded_write_hangs_for_ever_ends(tmp_path):
    subprocess.run([sys.executable, "-c", _HANG_AND_END, tmp_path], check=True, timeout=300)
    assert peek(tmp_path)["step"] == 2


_WRITE_AND_END = """
import sys, warnings, torch
from echelon.dist.checkpoint import Keeper
from echelon.dist.checkpoint.disk import files
from echelon.dist.checkpoint.ranks import pending
warnings.simplefilter("ignore")
files.NewFile.sync = lambda self: None
many = {f"weight {number}": torch.ones(800, 800).t() for number in range(60)}
keeper = Keeper(sys.argv[1], patience_s=1e-6)
assert keeper.save(1, many, async_op=True)
assert keeper.save(2, {"step": 2})
print(pending.has_superseded())
"""


def test_a_program_ends_well_while_a_superseded_write_is_copying(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _WRITE_AND_END, tmp_path],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# ---- jobs that share a folder ----

_HOLD = """
import fcntl, json, os, socket, sys
file = open(sys.argv[1] + "/.keeper", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(json.dumps([socket.gethostname(), os.getpid()]), file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_job_on_the_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(claim.Claim.__init__, "__kwdefaults__",
                        {"same_host_s": 0.2, "other_host_s": 0.2})  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        keeper = Keeper(tmp_path)
        with pytest.raises(CheckpointError, match=f"process {other.pid} on .*its own folder"):
            keeper.save(1, state_at(1))
        other.kill()
    assert keeper.save(1, state_at(1))
    keeper.close()


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    keeper = Keeper(tmp_path)
    assert keeper.save(1, state_at(1))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    keeper.close()
    keep_all(tmp_path, [2])
    os.write(write, b"x")
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


# ---- several ranks ----


def _ranks(rank, world_size, folder):
    from pathlib import Path

    dist.init(timeout_s=60.0)
    place = Path(folder)
    keeper = Keeper(place, keep=2)
    saved = [keeper.save(step, state_at(step), async_op=step % 2 == 0) for step in (1, 2, 3)]
    if rank == 1:  # the disk of one rank is full
        real = files.NewFile.write

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files.NewFile.write = write
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved.append(keeper.save(4, state_at(4)))
        texts = [str(one.message) for one in caught]
    if rank == 1:
        files.NewFile.write = real
    found = str(newest(place))
    saved.append(keeper.save(5, state_at(5)))
    dist.shutdown()
    return saved, texts, found


def _ranks_on_a_slow_disk(rank, world_size, folder):
    from pathlib import Path

    dist.init(timeout_s=60.0)
    keeper = Keeper(Path(folder), patience_s=60)
    released = threading.Event()
    if rank == 1:  # its disk alone is slow
        real = files.NewFile.write

        def write(self, data):
            assert released.wait(60)
            real(self, data)

        files.NewFile.write = write
    saved = [keeper.save(1, state_at(1), async_op=True), keeper.save(2, state_at(2), async_op=True)]
    released.set()
    saved += [keeper.wait(), keeper.save(3, state_at(3), async_op=True)]
    dist.shutdown()
    return saved


@pytest.mark.ranks
def test_a_checkpoint_is_skipped_on_all_ranks_while_one_of_them_still_writes(tmp_path):
    first, other = run_ranks(_ranks_on_a_slow_disk, 2, str(tmp_path))
    assert first == other == [True, False, True, True]
    assert steps_in(tmp_path) == [1, 3]


def _ranks_with_a_hung_disk(rank, world_size, folder):
    from pathlib import Path

    dist.init(timeout_s=60.0)
    keeper = Keeper(Path(folder), patience_s=1e-6)
    if rank == 1:  # the first write on its disk alone hangs
        real, num = files.NewFile.write, iter(range(1000))

        def write(self, data):
            if next(num) == 0:
                threading.Event().wait()
            real(self, data)

        files.NewFile.write = write
    saved = [keeper.save(1, state_at(1), async_op=True), keeper.save(2, state_at(2), async_op=True)]
    saved.append(keeper.wait())
    dist.shutdown()
    return saved


@pytest.mark.ranks
def test_a_checkpoint_is_superseded_on_all_ranks_if_the_write_of_one_hangs(tmp_path):
    first, other = run_ranks(_ranks_with_a_hung_disk, 2, str(tmp_path))
    assert first == other == [True, True, True]
    assert newest(tmp_path) == tmp_path / "step_00000002"


@pytest.mark.ranks
def test_ranks_agree_though_the_disk_of_one_is_full(tmp_path):
    (saved, texts, found), other = run_ranks(_ranks, 2, str(tmp_path))
    assert saved == [True, True, True, False, True]
    assert other == (saved, [], found)
    (line,) = texts
    assert "rank 1 failed" in line
    assert "No space left" in line
    assert found.endswith("step_00000003")
    assert steps_in(tmp_path) == [3, 5]
