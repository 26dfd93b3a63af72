"""Arrays on a device beside those of the host: an engine made when the first one comes.

The device is made up: its arrays claim to be CUDA's and lie in this process's memory, and the
example backend carries them. So everything above a driver runs, and no driver is claimed.
"""

from __future__ import annotations

import importlib.metadata
import types

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveMismatchError, CollectiveTimeoutError
from tests.dist.example_backend import StoreEngine
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_POINT = importlib.metadata.EntryPoint(
    "pretend", "tests.dist.test_by_device:create", registry.ENTRY_POINTS
)


class DeviceArray:
    """An array that claims to lie on a device."""

    def __init__(self, values, index=0):
        self.host = np.array(values, np.float32)
        self.device = types.SimpleNamespace(id=index)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.host.shape, "typestr": "<f4", "strides": None, "version": 3,
            "data": (self.host.ctypes.data, False),
        }  # fmt: skip


class PretendEngine(StoreEngine):
    """The example backend, on arrays of the made-up device."""

    name = "pretend"
    device = "cuda"
    made: list[str] = []  # noqa: RUF012 -- of this process

    def __init__(self, members, store, timeout_s):
        super().__init__(members, store)
        self.made.append(f"{members.device}:{members.device_index}")

    def _carry_out(self, operation, watch):
        fields = {name: getattr(operation, name) for name in operation.__slots__}
        for name in ("source", "target"):
            if fields[name] is not None:
                fields[name] = fields[name].owner.host.reshape(-1)
        super()._carry_out(type(operation)(**fields), watch)


def create(members, store, timeout_s):
    return PretendEngine(members, store, timeout_s)


create.device = "cuda"


def _init(**settings):
    registry.entry_points = lambda group: [_POINT] if group == registry.ENTRY_POINTS else []
    return dist.init(None, timeout_s=20, **settings)


def _mix(rank: int, world_size: int) -> None:
    world = _init()
    assert world.backend == "shm"
    with pytest.raises(ValueError, match="first operation on cuda must be a collective"):
        world.send(DeviceArray([1]), (rank + 1) % world_size)
    made = importlib.import_module("tests.dist.test_by_device").PretendEngine.made
    assert made == []
    for turn in range(3):  # blocking, between the host's, which keep their order and numbers
        x, host = DeviceArray([rank + 1.0, turn], index=rank), np.full(5, rank + 1.0)
        world.all_reduce(x)
        world.all_reduce(host)
        assert x.host.tolist() == [world_size * (world_size + 1) / 2, turn * world_size]
        assert host[0] == x.host[0]
    assert made == [f"cuda:{rank}"]
    works = [world.all_reduce(DeviceArray([1.0] * n), async_op=True) for n in (1, 2, 3)]
    y = np.ones(3)
    works.append(world.all_reduce(y, async_op=True))
    for work in works:
        work.wait(timeout_s=20)
        assert work.done
    out = DeviceArray([0.0] * world_size)
    with world.coalesce():
        world.all_gather(out, DeviceArray([float(rank)]))
        world.all_reduce(y)
    assert out.host.tolist() == list(range(world_size))
    with pytest.raises(ValueError, match="backend 'pretend' has no reduce_scatter"):
        world.reduce_scatter(DeviceArray([0.0]), DeviceArray([1.0] * world_size))
    with pytest.raises(ValueError, match="out is on cpu, but x is on cuda:0"):
        world.all_gather(np.zeros(world_size, np.float32), DeviceArray([1.0]))
    halves = world.split(rank % 2)  # a group of its own, with its own engine
    z = DeviceArray([1.0])
    halves.all_reduce(z)
    assert z.host[0] == halves.size
    assert len(made) == 2
    world.barrier()
    dist.shutdown()


def test_arrays_of_host_and_device_travel_in_one_group():
    run_ranks(_mix, 4, timeout_s=60)


def _differ(rank: int, world_size: int) -> None:
    world = _init()
    x = np.ones(3, np.float32) if rank == 1 else DeviceArray([1.0] * 3)
    with pytest.raises(
        CollectiveMismatchError,
        match=r"all_reduce #0 .*rank 1 called all_reduce\(sum\) float32\[3\], "
        r"the others all_reduce\(sum\) float32\[3\] on cuda",
    ) as caught:
        world.all_reduce(x)
    assert caught.value.ranks == (1,)
    dist.shutdown()


def test_a_rank_that_passes_an_array_of_the_host_is_named_before_an_engine_is_made():
    run_ranks(_differ, 3)


def _stay_away(rank: int, world_size: int) -> None:
    registry.entry_points = lambda group: [_POINT] if group == registry.ENTRY_POINTS else []
    world = dist.init(None, timeout_s=60)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #0 .*missing: 1") as caught:
            world.all_reduce(DeviceArray([1.0]), timeout_s=1.0)
        assert (caught.value.ranks, caught.value.operation) == ((1,), "all_reduce")
        with pytest.raises(CollectiveTimeoutError, match="broken since"):
            world.barrier()
        _store().set("gave-up", "1")
    else:
        _store().get("gave-up", timeout=60)
    dist.shutdown()


def _store():
    return importlib.import_module("echelon.dist.runtime")._need().store


def test_a_rank_that_never_comes_to_a_device_is_named():
    run_ranks(_stay_away, 2)


def test_without_a_backend_for_the_device_the_call_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = dist.init()
    try:
        with pytest.raises(ValueError, match="cannot be used in group 'world': backend 'nccl'"):
            world.all_reduce(DeviceArray([1.0]))
        world.all_reduce(np.ones(2))
    finally:
        dist.shutdown()
