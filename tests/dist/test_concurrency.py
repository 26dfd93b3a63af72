"""Threads that use groups at the same time: messages under many tags, several groups in flight."""

from __future__ import annotations

import importlib
import threading

import numpy as np
import pytest

import echelon.dist as dist
from tests.dist import oracle
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

NUM_THREADS = 4
SIZES = (1, 1000, 100_001)


def _pass_messages(world, tag: int) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for turn in range(6):
        size = SIZES[(turn + tag) % len(SIZES)]
        mine = oracle.data("float32", (size,), world.rank, turn * 100 + tag)
        theirs = np.empty_like(mine)
        if tag % 2:
            works = [
                world.recv(theirs, before, tag=tag, async_op=True),
                world.send(mine, after, tag=tag, async_op=True),
            ]
            for work in works:
                work.wait(timeout_s=60)
        else:
            sent = world.send(mine, after, tag=tag, async_op=True)
            world.recv(theirs, before, tag=tag)
            sent.wait(timeout_s=60)
        expected = oracle.data("float32", (size,), before, turn * 100 + tag)
        oracle.assert_same_bits(theirs, expected, f"message {turn} of tag {tag}")


def _sum_in(group, seed: int) -> None:
    for turn in range(8):
        size = SIZES[turn % len(SIZES)]
        parts = [oracle.data("float32", (size,), r, seed + turn) for r in range(group.size)]
        x = parts[group.rank].copy()
        if turn % 2:
            group.all_reduce(x)
        else:
            group.all_reduce(x, async_op=True).wait(timeout_s=60)
        expected = oracle.reduced(parts, "sum")
        oracle.assert_reduced(x, expected, f"sum {turn} in {group.name}", "sum", ordered=True)


def _use_from_threads(rank: int, world_size: int, backend: str) -> None:
    hierarchy = importlib.import_module("echelon.dist.backends.two_level")
    hierarchy.host_identity = lambda: {"boot": f"host {rank // 2}"}
    world = dist.init(backend, timeout_s=60, reduction="rank_ordered")
    groups = [dist.new_group(list(reversed(range(world_size)))), world.split(rank % 2)]
    wrong: list[BaseException] = []

    def guarded(job, *args) -> None:
        try:
            job(*args)
        except BaseException as err:  # noqa: BLE001 -- raised again below, on the main thread
            wrong.append(err)

    jobs = [(_pass_messages, world, tag) for tag in range(NUM_THREADS)]
    jobs += [(_sum_in, group, 50 * number) for number, group in enumerate((world, *groups))]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    if wrong:
        raise wrong[0]
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(
    ("backend", "engine"),
    [("shm", "native"), ("shm", "python"), ("gloo", "native"), ("shm+gloo", "native")],
)
def test_threads_use_several_groups_at_once(backend, engine):
    if backend != "shm":
        pytest.importorskip("torch")
    run_ranks(_use_from_threads, 4, backend, timeout_s=120, environ={"ECHELON_SHM": engine})


def _leave_at_once(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=60)
    for _ in range(150):
        group = dist.new_group(range(world_size))
        x = np.full(4, rank, np.int64)
        outs = [np.empty(4 * world_size, np.int64) for _ in range(3)]
        works = [group.all_gather(out, x, async_op=True) for out in outs]
        works[-1].wait()
        group.close()  # the engine's thread may still be on its way out of the last operation
        assert all((out == np.repeat(np.arange(world_size), 4)).all() for out in outs)
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize("engine", ["native", "python"])
def test_who_leaves_right_after_its_last_operation_takes_nothing_from_the_others(engine):
    run_ranks(_leave_at_once, 4, timeout_s=120, environ={"ECHELON_SHM": engine})
