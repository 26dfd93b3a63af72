"""What the backends of real devices share, on a device that is made up: order, errors, ends."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import signal
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from tests.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks

_POINT = importlib.metadata.EntryPoint(
    "made-up", "tests.dist.made_up_device:create", registry.ENTRY_POINTS
)


def _init(backend, **settings):
    registry.entry_points = lambda group: [_POINT] if group == registry.ENTRY_POINTS else []
    torch.set_num_threads(1)
    # A tensor's memory is the host's here, and no allocator asks which stream uses it.
    torch.Tensor.record_stream = lambda *_: None
    world = dist.init(backend, **settings)
    return world, importlib.import_module("tests.dist.made_up_device").DeviceArray


def _compute_between(rank: int, world_size: int, backend, reduction: str) -> None:
    world, array = _init(backend, timeout_s=30, reduction=reduction)
    total = world_size * (world_size + 1) / 2
    x = array(torch.zeros(3))
    x.compute(lambda t: t.fill_(rank + 1))  # queued: the host does not wait for it
    world.all_reduce(x)
    x.compute(lambda t: t.mul_(2))  # queued behind the sum
    assert x.read().tolist() == [2 * total] * 3
    y, out = array(torch.zeros(2)), array(torch.zeros(2 * world_size))
    y.compute(lambda t: t.fill_(rank))
    works = [world.all_gather(out, y, async_op=True), world.all_reduce(y, "max", async_op=True)]
    for work in works:
        work.wait()
    assert out.read().tolist() == [r for r in range(world_size) for _ in range(2)]
    assert y.read().tolist() == [world_size - 1] * 2
    assert all(work.done for work in works)
    _move(world, array)
    _reduce(world, array)
    world.barrier()
    dist.shutdown()


def _move(world, array) -> None:
    me, size = world.rank, world.size
    for dtype in (torch.int16, torch.bool, torch.float64):
        z = array(torch.full((3,), me % 2, dtype=dtype))
        world.broadcast(z, 1)
        assert z.read().tolist() == [1] * 3
    empty = array(torch.zeros(0))
    world.broadcast(empty, 0)
    out = array(torch.zeros(size * (size + 1) // 2)) if me == 0 else None
    mine = array(torch.full((2,), float(me)))
    gathered = array(torch.zeros(2 * size)) if me == 0 else None
    world.gather(gathered, mine, 0)
    if gathered is not None:
        assert gathered.read().tolist() == [r for r in range(size) for _ in range(2)]
    world.scatter(mine, gathered, 0)
    assert mine.read().tolist() == [me] * 2
    rows = array(torch.full((size * (size + 1) // 2,), float(me)))
    out = array(torch.full(((me + 1) * size,), -1.0))
    splits = [rank + 1 for rank in range(size)]  # rank r gets r + 1 of everybody
    world.all_to_all(out, rows, output_splits=[me + 1] * size, input_splits=splits)
    assert out.read().tolist() == [r for r in range(size) for _ in range(me + 1)]
    sent, came = array(torch.full((4,), float(me))), array(torch.zeros(4))
    with world.coalesce():
        world.send(sent, (me + 1) % size)
        world.recv(came, (me - 1) % size)
    assert came.read().tolist() == [(me - 1) % size] * 4


def _reduce(world, array) -> None:
    me, size = world.rank, world.size
    values = [torch.tensor([0.1, 1e8, -1e8, 3.0]).roll(r) * (r + 1) for r in range(size)]
    expected = sum(values[1:], values[0].clone())  # in another order it is something else
    x = array(values[me])
    world.all_reduce(x, "avg")
    assert x.read().tolist() == (expected / size).tolist()
    kept = array(values[me])
    world.reduce(kept, 1)
    assert torch.equal(kept.read(), expected if me == 1 else values[me])
    out = array(torch.zeros(1))
    wide = array(torch.arange(size, dtype=torch.float32) + me)
    world.reduce_scatter(out, wide)
    assert out.read()[0] == size * me + size * (size - 1) / 2
    flags = array(torch.tensor([me == 0, True]))
    world.all_reduce(flags, "min")
    assert flags.read().tolist() == [False, True]
    with pytest.raises(ValueError, match="has no sums of int16"):
        world.all_reduce(array(torch.zeros(2, dtype=torch.int16)))
    with pytest.raises(ValueError, match="has no bxor"):
        world.all_reduce(array(torch.zeros(2, dtype=torch.int64)), "bxor")
    with pytest.raises(ValueError, match="works on cuda:0"):
        world.all_reduce(array(torch.zeros(2), index=1))


@pytest.mark.parametrize("backend", [None, "made-up"])
@pytest.mark.parametrize("reduction", ["fast", "rank_ordered"])
def test_operations_are_in_order_with_what_the_caller_computes(backend, reduction):
    run_ranks(_compute_between, 3, backend, reduction, timeout_s=90)


def _wait_for_missing(rank: int, world_size: int) -> None:
    world, array = _init("made-up", timeout_s=1.5)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        work.wait()  # in order behind the caller's stream, which does not say that it is done
        assert not work.done
        _wait_until_done(work)
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1 .* after 1.5 s"):
            work.wait()
        with pytest.raises(CollectiveTimeoutError, match="broken since all_reduce #1"):
            world.all_reduce(x)
        _store().set("gave-up", "1")
    else:
        _store().get("gave-up", timeout=20)
    dist.shutdown()


def _wait_until_done(work) -> None:
    deadline = time.monotonic() + 20
    while not work.done and time.monotonic() < deadline:
        time.sleep(0.01)


def _store():
    return importlib.import_module("echelon.dist.runtime")._need().store


def test_an_operation_that_a_rank_never_joins_ends_at_its_timeout():
    run_ranks(_wait_for_missing, 2, timeout_s=60)


def _wait_for_dead(rank: int, world_size: int) -> None:
    world, array = _init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1 ") as caught:
        _all_reduce_to_its_end(world, x)
    assert caught.value.ranks == (1,)
    dist.shutdown()


def _all_reduce_to_its_end(world, x) -> None:
    work = world.all_reduce(x, async_op=True)  # raises itself if the death is known already
    _wait_until_done(work)
    work.wait()


def test_a_killed_rank_ends_what_runs_on_the_device():
    run_ranks(_wait_for_dead, 3, exit_codes={1: -signal.SIGKILL}, timeout_s=60)


def _hear_of_failure(rank: int, world_size: int) -> None:
    """The library of rank 0 reports an error while an operation runs: all ranks' calls end."""
    world, array = _init("made-up", timeout_s=600)
    x = array(torch.ones(2))
    world.all_reduce(x)
    if rank == 0:
        work = world.recv(array(torch.ones(2)), 1, async_op=True)
        world._engine.engine_for("cuda").backend.reported = "a fault of the device"
        _wait_until_done(work)
        with pytest.raises(CollectiveError):
            work.wait()
        world.close()
        _store().set("reported", "1")
    else:
        _store().get("reported", timeout=30)
    dist.shutdown()


def test_an_error_that_the_library_reports_later_ends_the_group():
    run_ranks(_hear_of_failure, 2, timeout_s=60)


def _coalesce(rank: int, world_size: int) -> None:
    world, array = _init("made-up", timeout_s=30)
    assert world.backend == "made-up"
    x, y = array(torch.ones(2)), np.ones(2)
    with world.coalesce():
        world.all_reduce(x)
        world.all_reduce(x)
        world.all_reduce(y)  # the host's beside it
    assert (x.read().tolist(), y.tolist()) == ([4.0, 4.0], [2.0, 2.0])
    assert world.broadcast_object({"from": rank}, 1) == {"from": 1}
    assert world.split(rank).size == 1
    dist.shutdown()


def test_objects_and_arrays_of_the_host_go_beside_the_device():
    run_ranks(_coalesce, 2, timeout_s=60)
