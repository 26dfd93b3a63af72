"""NCCL on a real GPU: `make test ARGS="-m gpu"`. Skipped where there is none, with the reason."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveTimeoutError
from tests.ranks import run_ranks

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
