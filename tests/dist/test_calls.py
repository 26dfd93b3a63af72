"""The calls of a group as users write them: works, timeouts, objects, receives from any rank."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest

import echelon.dist as dist
from echelon.errors import CollectiveError, CollectiveTimeoutError
from tests.support.ranks import run_ranks


def _works(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    if rank == 0:
        work = world.all_reduce(x := np.ones(3), async_op=True)
        assert not work.is_completed()
        assert work.exception() is None
        world.send(np.zeros(1), 1)
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
        assert x.tolist() == [2.0] * 3
    else:
        world.recv(np.zeros(1), 0)  # so that rank 0 sees its work unfinished
        world.all_reduce(np.ones(3))
    own = [dist.new_group([0, 1]) for _ in range(world_size)][rank]  # one for each to abort
    work = own.recv(np.zeros(1), 1 - rank, async_op=True)
    own.abort()
    with pytest.raises(CollectiveError) as raised:
        work.wait()
    assert work.is_completed()
    assert work.exception() is raised.value
    world.barrier()
    dist.shutdown()


@pytest.mark.ranks
def test_a_work_tells_its_end_and_what_it_ended_with():
    run_ranks(_works, 2)


def _waits(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=60)
    both = dist.new_group([0, 1])
    x = np.ones(1)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        for limit in (0, 0.01, timedelta(milliseconds=10)):
            with pytest.raises(CollectiveTimeoutError, match="can be called again"):
                work.wait(limit)
        for wrong in (-1, float("nan"), "1", True):
            with pytest.raises(ValueError, match="timeout_s must be"):
                work.wait(wrong)
        both.barrier()
        work.wait(timedelta(seconds=60))
    else:
        both.barrier()
        world.all_reduce(x)
    assert x[0] == 2
    dist.shutdown()


@pytest.mark.ranks
def test_a_wait_takes_seconds_or_a_timedelta_and_refuses_other_limits():
    run_ranks(_waits, 2)


def _timeouts(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=60)
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    with pytest.raises(ValueError, match="timeout_s"):
        world.all_reduce(np.ones(1), timeout_s=0)
    if rank == 0:
        begun = time.monotonic()
        x, out = np.ones(1), np.ones(2)
        with pytest.raises(CollectiveTimeoutError, match="missing: 1"):
            groups[0].all_gather(out, x, timeout_s=0.3)
        with pytest.raises(CollectiveTimeoutError):
            groups[1].recv(x, 1, timeout_s=0.3)
        with pytest.raises(CollectiveTimeoutError, match="missing: 1"):
            groups[2].reduce(x, 0, timeout_s=0.3, async_op=True).wait()
        with pytest.raises(CollectiveTimeoutError, match="missing: 1"):
            groups[3].monitored_barrier(timedelta(seconds=0.3))
        assert time.monotonic() - begun < 30  # far from the group's limit
    world.barrier()
    dist.shutdown()


@pytest.mark.ranks
def test_one_operation_may_have_a_timeout_of_its_own():
    run_ranks(_timeouts, 2)


def _objects(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    group = dist.new_group([2, 0])
    mine = {"rank": rank, "data": [1.5, None, b"\x00" * (1000 * rank)]}
    for root in range(world_size):
        got = world.gather_object(mine, root)
        if rank == root:
            assert [one["rank"] for one in got] == [0, 1, 2]
            assert [len(one["data"][2]) for one in got] == [0, 1000, 2000]
        else:
            assert got is None
        parts = [["for", r, "x" * (r * 100)] for r in range(world_size)] if rank == root else None
        assert world.scatter_object(parts, root) == ["for", rank, "x" * (rank * 100)]
    if group is not None:  # ranks are those within the group
        assert group.gather_object(rank, 0) == ([2, 0] if rank == 2 else None)
        assert group.scatter_object([7, 8] if rank == 2 else None, 0) == (7 if rank == 2 else 8)
    world.barrier()
    dist.shutdown()


@pytest.mark.ranks
def test_objects_are_gathered_and_scattered():
    run_ranks(_objects, 3)


def test_objects_that_cannot_be_carried_are_refused_before_anything_is_sent():
    world = dist.init()
    try:
        for call in (
            lambda: world.gather_object(object(), 0),
            lambda: world.scatter_object([object()], 0),
        ):
            with pytest.raises(TypeError, match="plain data"):
                call()
        for objs in (None, [], [1, 2]):
            with pytest.raises(ValueError, match="must pass one object per rank"):
                world.scatter_object(objs, 0)
        for call in (
            lambda: world.broadcast_object(1, 0),
            lambda: world.all_gather_object(1),
            lambda: world.gather_object(1, 0),
            lambda: world.scatter_object([1], 0),
            lambda: world.split(0),
        ):
            with world.coalesce(), pytest.raises(ValueError, match="inside coalesce"):
                call()
        assert world.num_collectives == 0
    finally:
        dist.shutdown()


def _from_any(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    if rank == 0:
        x = np.zeros(2)
        senders = []
        for _ in range(world_size - 1):
            sender = world.recv(x, None, tag=5)
            assert x.tolist() == [sender, 10.0 * sender]
            senders.append(sender)
        assert sorted(senders) == list(range(1, world_size))
        work = world.recv(x, None, tag=6, async_op=True)
        world.send(np.zeros(1), 2)
        work.wait()
        assert (work.source, x.tolist()) == (2, [2.0, 20.0])
        assert world.recv(x, 1, tag=7) == 1
    else:
        message = np.array([rank, 10.0 * rank])
        world.send(message, 0, tag=5)
        if rank == 2:
            world.recv(np.zeros(1), 0)
            world.send(message, 0, tag=6)
        if rank == 1:
            world.send(message, 0, tag=7)
    world.barrier()
    dist.shutdown()


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_receive_from_any_rank_names_the_sender(engine):
    run_ranks(_from_any, 3, environ={"ECHELON_SHM": engine})
