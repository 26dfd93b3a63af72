"""Killed at any call of a keeper's save and rotation, a job finds its newest checkpoint whole."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import Keeper, load, newest  # noqa: E402
from tests.dist.checkpoint.test_kill import act_at, die  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
BEST = 2


def state_at(step):
    return {"weight": torch.full((64,), float(step)), "step": step}


def save_steps(folder, *steps, async_op=False):
    with Keeper(folder, keep=2, best="lowest") as keeper:
        for step in steps:
            assert keeper.save(step, state_at(step), async_op=async_op, score=abs(step - BEST))
        assert keeper.wait()


def step_of(path):
    state = load(path, state_at(-1))
    assert state["weight"].unique().tolist() == [float(state["step"])]
    return state["step"]


def killed_at(folder, moment, *, async_op):
    """Save, be killed at a call, and look; return the newest step and whether the call was met."""
    save_steps(folder, 1, BEST, 3, 4)
    child = os.fork()
    if child == 0:
        act_at(moment, die)
        save_steps(folder, 5, 6, async_op=async_op)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), (moment, code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of half-written ones
        found = newest(folder)
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a fallback: the newest was damaged
        assert step_of(found) == step_of(folder)
        assert step_of(folder / f"step_{BEST:08d}") == BEST
    last = step_of(folder)
    assert last in (4, 5, 6), (moment, last)
    save_steps(folder, 7)  # the job that is started again
    kept = sorted(int(path.name[5:]) for path in folder.glob("step_*"))
    assert kept[0] == BEST, kept
    assert kept[-1] == 7, kept
    assert len(kept) == 3, kept
    assert not list(folder.glob(".*.trash"))
    return last, code != 0


def _killed(rank, world_size, folder, moments, async_op):
    ends = [killed_at(Path(folder, str(moment)), moment, async_op=async_op) for moment in moments]
    return [last for last, was_met in ends if was_met]


@pytest.fixture
def memory():
    """A folder in memory: flushing a disk takes longer than all else here."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield folder


def test_a_keeper_that_is_killed_leaves_its_newest_checkpoint_whole(memory):
    seed = random.randrange(1 << 30)
    print("seed", seed)  # shown if it fails
    moments = sorted(random.Random(seed).sample(range(60), 8))
    (lasts,) = run_ranks(_killed, 1, memory, moments, False, timeout_s=120.0)
    assert len(lasts) == 8
    assert lasts == sorted(lasts)  # the later it is killed, the newer it is


@pytest.mark.slow
def test_a_keeper_that_is_killed_at_every_call_leaves_its_newest_checkpoint_whole(memory):
    (lasts,) = run_ranks(_killed, 1, memory, range(160), False, timeout_s=600.0)
    print(len(lasts), "kills")
    assert len(lasts) >= 60
    assert set(lasts) == {4, 5, 6}
