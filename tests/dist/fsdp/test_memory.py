"""Memory stays within its limits, and launches of two levels within one order."""

from __future__ import annotations

import random
import types

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from echelon.dist.fsdp import fully_shard  # noqa: E402
from echelon.dist.fsdp.memory.pages import Pages  # noqa: E402
from echelon.dist.fsdp.memory.releases import Releases  # noqa: E402
from echelon.dist.fsdp.memory.storage import DeviceStorage, HostStorage, Pool  # noqa: E402
from echelon.dist.fsdp.step.driver import Driver  # noqa: E402
from echelon.dist.fsdp.step.reducer import Reducer  # noqa: E402
from tests.dist import made_up_device  # noqa: E402

CPU = torch.device("cpu")


# ---- what a device may still use ----


class Pending:
    """Kernels that are under way on a made-up device, each with memory that was released."""

    def __init__(self, releases):
        self.releases, self.most = releases, 0
        self.stream = made_up_device.accelerator.current_stream()

    def run(self, storage):
        storage.take()
        self.most = max(self.most, self.releases.num_bytes + storage.tensor.nbytes)
        storage.release([])


def test_a_host_that_runs_ahead_waits_for_the_device_before_it_takes_more_memory():
    releases = Releases(lambda: 3000, lambda _: made_up_device.accelerator)
    pending = Pending(releases)
    storages = [DeviceStorage(250, torch.float32, CPU, releases) for _ in range(12)]
    for storage in storages:
        pending.run(storage)
    assert pending.most == 3000
    assert releases.num_bytes == 3000
    releases.make_room(3000)
    assert releases.num_bytes == 0


def test_a_unit_larger_than_the_limit_waits_for_all_others_and_is_gathered():
    releases = Releases(lambda: 10, lambda _: made_up_device.accelerator)
    pending = Pending(releases)
    for storage in [DeviceStorage(250, torch.float32, CPU, releases) for _ in range(3)]:
        pending.run(storage)
    assert pending.most == 1000


def test_a_capture_records_no_release():
    device = made_up_device.accelerator
    releases = Releases(lambda: 0, lambda _: device)
    storage = DeviceStorage(250, torch.float32, CPU, releases)
    graph = made_up_device.Graph()
    with device.graph(graph):
        storage.take()
        storage.release([])
        storage.take()  # would wait for an event that never happens
    assert releases.num_bytes == 0


# ---- what lies idle on the host ----


def test_idle_pages_stay_within_the_limit():
    size = 4 << 20
    pages = Pages(lambda: 2 * size)
    storages = [HostStorage(size // 4, torch.float32, pages) for _ in range(4)]
    for storage in storages:
        storage.take()
        storage.tensor.fill_(1.0)
    for storage in storages:
        storage.release([])
    assert pages.num_bytes == 2 * size


def test_a_buffer_that_returns_after_its_pool_was_cleared_is_forgotten():
    pool = Pool()
    buffer = pool.acquire(100, torch.float32, CPU)
    pool.clear()
    pool.give_back(buffer)
    assert pool.num_bytes == 0


@pytest.mark.parametrize("budget", [-1, 1.5, True, "1 GiB"])
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(ValueError, match="memory_budget_bytes must be a number of bytes"):
        fully_shard(nn.Linear(2, 2), memory_budget_bytes=budget)


# ---- two levels ----


class Group:
    """A group whose collectives complete whenever chance has it; it notes their launches."""

    def __init__(self, name, launches, draw):
        self.name, self.launches, self.draw, self.size = name, launches, draw, 2
        self.ranks = (0, 1)

    def _work(self, what):
        self.launches.append(f"{self.name} {what}")
        draw = self.draw

        class Work:
            done = property(lambda _: draw.random() < 0.5)

            def wait(self):
                pass

        return Work()

    def reduce_scatter(self, out, x, op, async_op):
        return self._work(int(out.numel()))

    def all_reduce(self, x, op="sum", async_op=False):
        return self._work(int(x.numel()))

    def all_gather(self, out, x):
        out.view(2, -1).copy_(x.expand(2, -1))


class Flat:
    """What a reduction reads of a flat without parameters."""

    reduce_dtype = dtype = torch.float32
    device, chunk, members, trains = CPU, torch.zeros(1), (), True

    def __init__(self, number):
        self.number = number
        numel = 128 * (number + 1)
        self.layout = types.SimpleNamespace(numel=2 * numel, chunk_numel=numel)


def _launches(seed):
    launches, draw = [], random.Random(seed)
    groups = [Group(name, launches, draw) for name in ("shard", "copy")]
    reducer = Reducer(Pool(), *groups, lambda *_: None)
    units = [types.SimpleNamespace(flats=[Flat(number)]) for number in range(5)]
    for index, unit in enumerate(units):
        if index > 1:
            reducer.finish_first(units[index - 2])
        reducer.start(unit)
    reducer.finish([0, 0])
    return launches


def test_both_levels_are_launched_in_one_order_whenever_they_complete():
    expected = _launches(0)
    assert expected[:5] == ["shard 128", "copy 128", "shard 256", "copy 256", "shard 384"]
    assert all(_launches(seed) == expected for seed in range(1, 30))


class Splitting(Group):
    """A group that can be split."""

    backend = "shm"

    def __init__(self, name, launches):
        super().__init__(name, launches, random.Random(0))
        self.size, self.rank = 4, 0

    def split(self, color, key, name):
        return Splitting(name, self.launches)


def test_groups_make_their_communicators_when_units_are_made_and_not_within_a_step():
    launches = []
    driver = Driver(Splitting("world", launches), Splitting("copies", launches))
    driver.near(2)
    device = torch.device("meta")
    driver.prepare(CPU)
    assert not launches
    driver.prepare(device)
    assert launches == ["world 1", "world/reduce 1", "copies 1", "world/near2 1"]
    driver.prepare(device)
    driver.near(1)
    driver.prepare(device)
    assert launches[4:] == ["world/near1 1"]
