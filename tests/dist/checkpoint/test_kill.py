"""Killed at any moment of a save, a job finds the checkpoint before it, or the new one: whole."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import versions  # noqa: E402
from echelon.errors import CheckpointError, EchelonError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
STEPS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")
_context = multiprocessing.get_context("forkserver")


@pytest.fixture
def memory():
    """A folder in memory: flushing a disk takes longer than all else here."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def state_at(step):
    """A state whose every tensor tells the step that it belongs to."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return {"model": model, "optimizer": optimizer, "step": step}


def loaded_step(path):
    state = load(path, state_at(-1))
    values = {float(v) for p in state["model"].parameters() for v in p.detach().reshape(-1)}
    assert values == {float(state["step"])}
    return state["step"]


def act_at(moment, act):
    """Have this process call `act` instead of its `moment`-th call that changes the disk."""
    counter = itertools.count()

    def wrap(call):
        def counted(*args, **kwargs):
            return act(call, *args) if next(counter) == moment else call(*args, **kwargs)

        return counted

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    return counter


def die(call, *args):
    if call.__name__ == "write":
        call(args[0], bytes(args[1])[:3])  # in the middle of it
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(folder, num_moments):
    """Save in fork after fork of this process, each killed one step later than the one before."""
    for moment in itertools.count():
        path = Path(folder, str(moment))
        save(path, state_at(1))
        fork = os.fork()
        if fork == 0:
            act_at(moment, die)
            save(path, state_at(2))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        if code == 0:
            num_moments.value = moment
            return
        assert code == -signal.SIGKILL, code


def test_a_kill_before_each_step_of_a_save_leaves_a_whole_checkpoint(memory):
    num_moments = _context.Value("i", 0)
    process = _context.Process(target=_save_and_die, args=(memory, num_moments))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert num_moments.value >= 25, "a save has more steps than that"
    steps_found = []
    for moment in range(num_moments.value):
        path = memory / str(moment)
        steps_found.append(loaded_step(path))
        save(path, state_at(3))  # and what was left behind is in nobody's way
        assert loaded_step(path) == 3
        assert sorted(path.iterdir()) == list(versions(path))
    assert steps_found == sorted(steps_found)  # 1 up to the commit, 2 from then on
    assert set(steps_found) == {1, 2}


def _save_forever(path, go):
    save(path, state_at(1))
    go.set()
    for step in itertools.count(2):
        pending = save(path, state_at(step), async_op=step % 2 == 0)
        if pending:
            pending.wait()


def test_a_kill_at_any_time_leaves_a_whole_checkpoint(memory):
    seed = random.randrange(1 << 30)
    clock = random.Random(seed)
    found = []
    for number in range(12):
        path = memory / str(number)
        go = _context.Event()
        process = _context.Process(target=_save_forever, args=(path, go), daemon=True)
        process.start()
        assert go.wait(60)
        time.sleep(clock.uniform(0.0, 0.06))  # not to wait for something: a moment at random
        process.kill()
        process.join(60)
        found.append(loaded_step(path))
    assert min(found) >= 1, seed
    assert max(found) >= 2, "no save had the time to complete"


def _lose_one(rank, world_size, path, victim, moment):
    dist.init(timeout_s=20.0)
    save(path, state_at(1))
    if rank == victim:
        act_at(moment, die)
    with pytest.raises(EchelonError, match=f"rank {victim}"):
        save(path, state_at(2))


@pytest.mark.parametrize(("victim", "moment"), [(0, 3), (0, 9), (1, 1), (1, 4)])
def test_a_rank_killed_while_saving_is_named_and_nothing_is_lost(memory, victim, moment):
    path = str(memory / "checkpoint")
    run_ranks(_lose_one, 2, path, victim, moment, exit_codes={victim: -signal.SIGKILL})
    assert loaded_step(path) == 1


def _lose_one_in_the_background(rank, world_size, path):
    dist.init()
    save(path, state_at(1))
    if rank == 1:
        act_at(2, die)
    pending = save(path, state_at(2), async_op=True, timeout_s=5.0)
    with pytest.raises(
        CheckpointError, match=r"not saved within 5 s; ranks whose parts are missing: 1$"
    ):
        pending.wait()


def test_a_rank_killed_in_the_background_is_named_after_the_timeout(memory):
    path = str(memory / "checkpoint")
    run_ranks(_lose_one_in_the_background, 2, path, exit_codes={1: -signal.SIGKILL})
    assert loaded_step(path) == 1


def full_disk(call, *args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_space(rank, world_size, path):
    """Rank 1's disk is full: both say so, at once; in the background, with the next call."""
    dist.init()
    save(path, state_at(1))
    originals = {name: getattr(os, name) for name in STEPS}

    def break_once():
        if rank == 1:
            act_at(2, full_disk)

    def repair():
        for name, call in originals.items():
            setattr(os, name, call)

    kind = OSError if rank == 1 else CheckpointError
    break_once()
    with pytest.raises(kind, match="No space left"):
        save(path, state_at(2))
    repair()
    dist.world().barrier()  # rank 0 has cleaned up
    assert [p.name for p in Path(path).iterdir()] == ["000001"]
    break_once()
    pending = save(path, state_at(3), async_op=True)
    pending._thread.join(30)
    repair()
    with pytest.raises((OSError, CheckpointError), match="No space left"):
        save(path, state_at(4))
    state = load(path, state_at(-1))
    assert state["step"] == 1
    save(path, state_at(5))
    dist.shutdown()
    return loaded_step(path)  # without a world each rank reads by itself


def test_a_full_disk_of_one_rank_fails_the_save_on_all(memory):
    assert run_ranks(_no_space, 2, str(memory / "checkpoint")) == [5, 5]
