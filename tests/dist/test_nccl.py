"""NCCL on a real GPU: `make test ARGS="-m gpu"`. Skipped where there is none, with the reason."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveError, CollectiveTimeoutError
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

# Several ranks on one GPU are an experiment of NCCL's (2.30); with few blocks each they fit.
_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}


@pytest.fixture(autouse=True)
def _nccl_is_ready():
    reason = next(status.reason for status in registry.statuses() if status.name == "nccl")
    if reason:
        pytest.skip(reason)


def _compute_and_exchange(rank: int, world_size: int, backend, reduction: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init(backend, timeout_s=60, reduction=reduction)
    total = world_size * (world_size + 1) / 2
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        x = torch.zeros(100_001, dtype=dtype, device="cuda")
        x += rank + 1
        world.all_reduce(x)
        x *= 2
        assert (x == 2 * total).all()
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        y = torch.full((7,), rank, device="cuda").to(dtype)
        world.broadcast(y, world_size - 1)
        assert (
            y.to(torch.float32) == torch.tensor(world_size - 1.0).to(dtype).float().item()
        ).all()
    mine = torch.full((3,), float(rank), device="cuda")
    out = torch.empty(world_size, 3, device="cuda")
    works = [world.all_gather(out, mine, async_op=True), world.all_reduce(mine, async_op=True)]
    for work in works:
        work.wait()
    assert out[:, 0].tolist() == list(range(world_size))
    assert mine[0].item() == total - world_size
    part = torch.empty(5, device="cuda")
    world.reduce_scatter(part, torch.ones(5 * world_size, device="cuda"), "avg")
    assert (part == 1).all()
    splits = [r + 1 for r in range(world_size)]
    rows = torch.full((sum(splits),), float(rank), device="cuda")
    got = torch.empty((rank + 1) * world_size, device="cuda")
    world.all_to_all(got, rows, output_splits=[rank + 1] * world_size, input_splits=splits)
    assert got.tolist() == [r for r in range(world_size) for _ in range(rank + 1)]
    sent, came = torch.full((9,), float(rank), device="cuda"), torch.empty(9, device="cuda")
    with world.coalesce():
        world.send(sent, (rank + 1) % world_size)
        world.recv(came, (rank - 1) % world_size)
    assert (came == (rank - 1) % world_size).all()
    host = np.ones(3)
    world.all_reduce(host)
    assert host.tolist() == [world_size] * 3
    assert world.all_gather_object(rank) == list(range(world_size))
    world.barrier()
    dist.shutdown()


@pytest.mark.parametrize("backend", [None, "nccl"])
@pytest.mark.parametrize("reduction", ["fast", "rank_ordered"])
def test_two_ranks_compute_and_exchange(backend, reduction):
    run_ranks(_compute_and_exchange, 2, backend, reduction, environ=_ONE_GPU, timeout_s=180)


def _store():
    return importlib.import_module("echelon.dist.runtime")._need().store


def _wait_for_late(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init("nccl", timeout_s=3)
    x = torch.ones(10, device="cuda")
    world.all_reduce(x)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        work.wait()
        assert not work.done, "a kernel that waits for rank 1 cannot have ended"
        deadline = time.monotonic() + 30
        while not work.done and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
        torch.cuda.synchronize()  # the stuck kernel is gone
        _store().set("gave-up", "1")
    else:
        _store().get("gave-up", timeout=60)
    dist.shutdown()


def test_a_stuck_kernel_is_ended_at_the_timeout():
    run_ranks(_wait_for_late, 2, environ=_ONE_GPU, timeout_s=120)


def _exchange_without_a_batch(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init("nccl", timeout_s=60)
    other = 1 - rank
    for size in (0, 1, 1 << 20):
        sent = torch.full((size,), float(rank), device="cuda")
        came = torch.empty(size, device="cuda")
        world.send(sent, other)  # both ranks send first
        world.recv(came, other)
        assert (came == other).all()
    got = [torch.empty(3, device="cuda") for _ in range(4)]
    works = [world.recv(one, other, tag=tag % 2, async_op=True) for tag, one in enumerate(got)]
    total = torch.ones(10, device="cuda")
    world.all_reduce(total)  # a receive that is posted early holds up nothing
    assert (total == world_size).all()
    for number in range(4):
        value = torch.full((3,), 10.0 * rank + number, device="cuda")
        works.append(world.send(value, other, tag=number % 2, async_op=True))
    for work in works:
        work.wait()
    assert [one[0].item() for one in got] == [10.0 * other + number for number in range(4)]
    world.barrier()
    dist.shutdown()


def test_messages_pass_each_other():
    run_ranks(_exchange_without_a_batch, 2, environ=_ONE_GPU, timeout_s=180)


def _capture(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init("nccl", timeout_s=5)
    x = torch.ones(1000, device="cuda")
    world.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.all_reduce(x)
        time.sleep(1)  # the watcher looks at events meanwhile
    time.sleep(6)  # longer than the timeout
    x.fill_(1)
    for _ in range(3):
        graph.replay()
    assert (x == world_size**3).all()
    world.barrier()
    dist.shutdown()


def test_a_graph_replays_collectives():
    run_ranks(_capture, 2, environ=_ONE_GPU, timeout_s=120)


def _use_side_streams(rank: int, world_size: int) -> None:
    """Memory that the caller frees early is not used again before the operation has read it."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init("nccl", timeout_s=60)
    side = torch.cuda.Stream()
    second = dist.new_group([0, 1], name="second")
    for turn in range(50):
        with torch.cuda.stream(side):
            x = torch.full((1 << 20,), float(turn), device="cuda")
            work = (world if turn % 2 else second).all_reduce(x, async_op=True)
            kept = x if turn % 10 == 0 else None
            del x
            torch.full((1 << 20,), -1.0, device="cuda")
            work.wait()
            if kept is not None:
                assert (kept == turn * world_size).all()
    world.barrier()
    dist.shutdown()


def test_side_streams_and_two_groups():
    run_ranks(_use_side_streams, 2, environ=_ONE_GPU, timeout_s=180)


def _abort_a_stuck_kernel(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    world = dist.init("nccl", timeout_s=600)
    x = torch.ones(10, device="cuda")
    world.all_reduce(x)
    if rank == 0:
        work = world.all_reduce(x, async_op=True)
        began_s = time.monotonic()
        world.abort()
        assert time.monotonic() - began_s < 2
        with pytest.raises(CollectiveError):
            work.wait()
        torch.cuda.synchronize()
        _store().set("aborted", "1")
    else:
        _store().get("aborted", timeout=60)
    dist.shutdown()


def test_an_abort_ends_a_stuck_kernel():
    run_ranks(_abort_a_stuck_kernel, 2, environ=_ONE_GPU, timeout_s=120)


def _share_over_the_host(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    world = dist.init("shm", timeout_s=60)
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        x = torch.ones(100_001, device="cuda").to(dtype)
        world.all_reduce(x, "max" if dtype == torch.bool else "sum")
        expected = 1 if dtype == torch.bool else world_size
        assert (x.float() == expected).all()
    y = torch.full((1000,), float(rank), device="cuda")
    got = torch.empty(1000, device="cuda")
    world.send(y, (rank + 1) % world_size)
    world.recv(got, (rank - 1) % world_size)
    assert (got == (rank - 1) % world_size).all()
    world.barrier()
    dist.shutdown()


def test_ranks_share_one_gpu_over_the_host():
    run_ranks(_share_over_the_host, 3, timeout_s=120)
