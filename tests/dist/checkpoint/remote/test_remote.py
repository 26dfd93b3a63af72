"""Checkpoints at addresses: saved, found, kept and loaded, through stores that fail."""

from __future__ import annotations

import errno
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import Keeper, load, newest, peek, save  # noqa: E402
from echelon.dist.checkpoint.remote import store, version  # noqa: E402
from echelon.dist.checkpoint.remote.store import Remote  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

CALLS = ("ls", "cat_file", "pipe_file", "put_file", "rm_file")


@pytest.fixture
def memory():
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file"])
def address(request, memory, tmp_path):
    return memory if request.param == "memory" else f"file://{tmp_path}/run"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 0.3)
    at = Remote.at.__func__

    def hurried(cls, place):
        found = at(cls, place)
        found.patience_s = 0.3
        return found

    monkeypatch.setattr(Remote, "at", classmethod(hurried))


def state_at(step):
    return {"weight": torch.full((300_000,), float(step)), "step": step}


def loaded(address):
    state = load(address, state_at(-1))
    assert state["weight"].unique().tolist() == [float(state["step"])]
    return state["step"]


def objects():
    return sorted(MemoryFileSystem.store)


def damage(step, name, change):
    (path,) = [one for one in objects() if f"step_{step:08d}" in one and one.endswith(name)]
    content = bytearray(MemoryFileSystem.store[path].getvalue())
    MemoryFileSystem().pipe_file(path, bytes(change(content)))


@pytest.mark.parametrize("async_op", [False, True])
def test_what_is_saved_is_loaded_and_older_versions_go(address, async_op):
    assert newest(address) is None
    for step in (1, 2, 3):
        pending = save(address, state_at(step), keep=2, async_op=async_op)
        if pending is not None:
            pending.wait()
    assert loaded(address) == peek(address)["step"] == 3
    assert newest(address) == address
    remote = Remote.at(address)
    found = version.versions(remote)
    assert [one.name[:6] for one in found] == ["000002", "000003"]
    assert loaded(found[0].address) == 2
    assert sorted(found[0].sizes()) == ["commit", "manifest", "rank_00000.bin"]


def test_a_keeper_keeps_as_in_a_folder(address):
    scores = {10: 5.0, 20: 3.0, 30: 1.0}
    with Keeper(address, keep=2, keep_every=40, best="lowest") as keeper:
        for step in range(10, 70, 10):
            assert keeper.save(
                step, state_at(step), async_op=step % 20 == 0, score=scores.get(step)
            )
        assert keeper.wait()
    names = [name for name in sorted(Remote.at(address).sizes()) if "step" in name]
    assert names == [f"step_{step:08d}" for step in (30, 40, 50, 60)]
    assert newest(address) == f"{address}/step_00000060"
    assert loaded(address) == loaded(newest(address)) == 60


def flip(content):
    content[len(content) // 2] ^= 1
    return content


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rank_00000.bin", lambda content: content[:-1]),
        ("rank_00000.bin", flip),
        ("manifest", lambda _: b"torn"),
        ("commit", lambda _: b"torn"),
    ],
)
def test_damage_is_passed_over_with_a_line(memory, name, change):
    with Keeper(memory) as keeper:
        assert keeper.save(1, state_at(1))
        assert keeper.save(2, state_at(2))
    damage(2, name, change)
    with pytest.warns(RuntimeWarning, match="step_00000002.*loading .*step_00000001"):
        assert loaded(memory) == 1


def test_a_missing_file_is_named_once(memory):
    save(memory, state_at(1))
    (name,) = [name for name in MemoryFileSystem.store if name.endswith("rank_00000.bin")]
    del MemoryFileSystem.store[name]
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin: the file is missing"):
        loaded(memory)


def test_what_was_not_committed_does_not_count_and_goes_with_the_next(memory):
    save(memory, state_at(1))
    begun = version.RemoteUnfinished.create(Remote.at(memory))
    begun.path.write("rank_00000.bin", b"half")
    assert loaded(memory) == 1
    save(memory, state_at(2))
    assert loaded(memory) == 2
    assert not begun.path.sizes()


@pytest.mark.parametrize("call", CALLS)
def test_errors_that_pass_are_tried_again(memory, monkeypatch, call):
    whole, fails = getattr(MemoryFileSystem, call), [OSError("reset"), TimeoutError("slow")]

    def flaky(self, *args, **kwargs):
        if fails:
            raise fails.pop()
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, call, flaky)
    for step in (1, 2, 3):
        save(memory, state_at(step))
    assert not fails, f"{call} was not called"
    assert loaded(memory) == 3


@pytest.mark.parametrize("call", ["pipe_file", "put_file"])
def test_a_store_that_stays_down_fails_the_save_alone(memory, impatient, monkeypatch, call):
    save(f"{memory}/step_00000001", state_at(1))

    def down(self, *args, **kwargs):
        raise OSError(errno.ECONNREFUSED, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, call, down)
        with Keeper(memory, timeout_s=0.5) as keeper, pytest.warns(RuntimeWarning) as caught:
            assert not keeper.save(2, state_at(2))
    (line,) = {str(one.message) for one in caught}
    assert "step 2 not saved" in line
    assert "refused" in line
    assert "newest complete checkpoint: step 1" in line
    assert loaded(memory) == 1


def test_a_call_that_hangs_ends_at_the_deadline(memory, impatient, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_, **__: released.wait())
    try:
        with pytest.raises(OSError, match=r"memory://bucket/run.*cannot write begun within 0.3 s"):
            save(memory, state_at(1))
    finally:
        released.set()


def test_a_save_that_dies_at_any_object_leaves_the_one_before(memory, monkeypatch):
    """Every number of objects written before the end; then the next save works."""
    save(memory, state_at(1))
    writes = {name: getattr(MemoryFileSystem, name) for name in ("pipe_file", "put_file")}

    class Killed(BaseException):
        pass

    for last in range(10):
        done = []

        def write(name, self, *args, done=done, last=last, **kwargs):
            if len(done) == last:
                raise Killed
            done.append(name)
            return writes[name](self, *args, **kwargs)

        with monkeypatch.context() as patch:
            for name in writes:
                patch.setattr(
                    MemoryFileSystem,
                    name,
                    lambda *a, name=name, write=write, **k: write(name, *a, **k),
                )
            try:
                save(memory, state_at(2))
            except Killed:
                assert loaded(memory) == 1, last
            else:
                break
    assert last == 5  # begun, data, index, manifest, commit: each was the first that was not made
    assert loaded(memory) == 2


def test_a_key_in_an_address_is_never_shown(memory):
    place = Remote("s3://key:secret@bucket/run", MemoryFileSystem(), "bucket/run")
    assert "secret" not in str(place / "x")
    with pytest.raises(CheckpointError) as caught:
        version.candidates(place)
    assert "secret" not in str(caught.value) + caught.value.path


def _save_and_load(rank, world_size, address):
    dist.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = torch.nn.Linear(40, 30)
        for parameter in model.parameters():
            dist.world().broadcast(parameter.detach(), root=0)
        weight = model.weight.detach().clone()
        with Keeper(address) as keeper:
            assert keeper.save(5, {"model": model, "mine": torch.ones(3)})
            assert keeper.save(6, {"model": model, "mine": torch.ones(3)}, async_op=True)
            assert keeper.wait()
        model.weight.data.zero_()
        assert newest(address) == f"{address}/step_00000006"
        load(address, {"model": model})
        assert torch.equal(model.weight, weight)
    dist.shutdown()


@pytest.mark.ranks
def test_two_ranks_save_to_one_address(tmp_path):
    address = f"file://{tmp_path}/run"
    run_ranks(_save_and_load, 2, address)
    assert load(address, {"mine": torch.zeros(3)})["mine"].tolist() == [1, 1, 1]


def _save_apart(rank, world_size):
    dist.init()
    with pytest.raises(CheckpointError, match="not visible to this rank: all hosts must share"):
        save("memory://bucket/run", {"step": 1})
    dist.shutdown()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_store_that_ranks_do_not_share_is_refused():
    """The memory of a process: rank 1 never sees what rank 0 has created."""
    run_ranks(_save_apart, 2)
