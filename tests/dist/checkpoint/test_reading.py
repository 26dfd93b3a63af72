"""Replicas read a checkpoint once: each rank a share, which it passes on to the others."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import versions  # noqa: E402
from echelon.dist.checkpoint.ranks import reading  # noqa: E402
from echelon.dist.fsdp import fully_shard  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from tests.dist.checkpoint.states import make, same  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def state_of(seed):
    torch.manual_seed(seed)
    return {
        "big": torch.randn(3_000_000),
        "half": torch.randn(777, 3).bfloat16(),
        "turned": torch.randn(50, 60).t(),
        "odd": torch.randint(0, 9, (1001,), dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(2.5, dtype=torch.float64),
    }


class Counted:
    """The bytes that this process reads from files."""

    def __init__(self):
        self.num_bytes = 0
        self._preadv = os.preadv

    def __enter__(self):
        os.preadv = self._read
        return self

    def __exit__(self, *_):
        os.preadv = self._preadv

    def _read(self, *args):
        count = self._preadv(*args)
        self.num_bytes += count
        return count


def _read_once(rank, world_size, folder, wants_float):
    world = dist.init()
    reading._WINDOW_BYTES = world_size * 4096 if wants_float else 8 << 20
    tensors = state_of(0)
    model, optimizer = make()
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    save(folder, {"t": tensors, "model": model, "optimizer": optimizer, "rank": torch.ones(3)})
    wanted = {name: torch.empty_like(value) for name, value in tensors.items()}
    if wants_float:
        tensors["big"] = tensors["big"][:0]  # this many windows of 4 KiB would take too long
        wanted["big"] = torch.zeros(3_000_000)
        wanted["half"] = wanted["half"].float()
        tensors["half"] = tensors["half"].float()
        if rank == 1:  # wanted by one rank alone: it reads that by itself
            wanted["big"] = wanted["big"].double()
    other, theirs = make(seed=1)
    with Counted() as counted:
        load(folder, {"t": wanted, "model": other, "optimizer": theirs})
    if wants_float:
        assert wanted.pop("big").abs().sum() > 0
        del tensors["big"]
    assert same(wanted, tensors)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(theirs.state_dict(), optimizer.state_dict())
    assert world.size == world_size
    dist.shutdown()
    return counted.num_bytes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replicas_read_each_byte_on_one_rank_and_get_all(tmp_path, num_ranks):
    read = run_ranks(_read_once, num_ranks, str(tmp_path), False)
    total = sum(file.stat().st_size for file in versions(tmp_path)[-1].glob("*.bin"))
    assert total > 12_000_000
    assert sum(read) < 1.7 * total  # blocks of 1 MiB at the edges are read by two
    assert max(read) < 0.9 * total


def test_what_some_ranks_want_otherwise_they_read_by_themselves(tmp_path):
    run_ranks(_read_once, 2, str(tmp_path), True)


SETS = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "d": (0, 1), "alone": (1,), "all": (0, 1, 2)}


def _overlapping(rank, world_size, folder, by_torch):
    """Every pair of ranks wants something of its own; sizes differ, and windows are small."""
    if by_torch:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(f"{folder}.store", world_size),
            rank=rank, world_size=world_size,
        )  # fmt: skip
    else:
        dist.init()
    reading._WINDOW_BYTES = 1 << 16
    sizes = {"a": 99_999, "b": 3, "c": 150_001, "d": 50_000, "alone": 7, "all": 40_000}
    stored = {name: torch.arange(size) % 251 for name, size in sizes.items()}
    save(folder, {"t": {name: value.to(torch.uint8) for name, value in stored.items()}})
    wanted = {
        name: torch.zeros(sizes[name], dtype=torch.uint8)
        for name, ranks in SETS.items()
        if rank in ranks
    }
    load(folder, {"t": wanted})
    for name, value in wanted.items():
        assert torch.equal(value, stored[name].to(torch.uint8)), name
    if by_torch:
        torch.distributed.destroy_process_group()
    else:
        dist.shutdown()


@pytest.mark.parametrize("by_torch", [False, True])
def test_every_set_of_ranks_gets_what_it_wants(tmp_path, by_torch):
    run_ranks(_overlapping, 3, str(tmp_path / "saved"), by_torch, timeout_s=120)


def _replicated_shards(rank, world_size, folder):
    """Two replicas of two shards: ranks 0 and 2 hold the same elements, as do ranks 1 and 3."""
    dist.init()
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    models = [torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)]) for _ in "12"]
    for model in models:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    save(folder, {"model": models[0]})
    with Counted() as counted:
        load(folder, {"model": models[1]})
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    held = sum(one.numel() * one.element_size() for one in models[1].parameters())
    dist.shutdown()
    return counted.num_bytes, held


def test_replicas_of_shards_read_each_byte_on_one_rank(tmp_path):
    read = run_ranks(_replicated_shards, 4, str(tmp_path), timeout_s=120)
    total = sum(file.stat().st_size for file in versions(tmp_path)[-1].glob("*.bin"))
    assert total > 24_000_000
    for num_bytes, held in read:
        assert 0.45 * total < held < 0.55 * total
        assert num_bytes < 0.8 * held  # half of it, and blocks of 1 MiB at the edges
    assert sum(num_bytes for num_bytes, _ in read) < 1.5 * total


def _damaged(rank, world_size, folder):
    dist.init()
    for step in (1, 2):
        save(folder, {"x": torch.full((3_000_000,), float(step)), "step": step})
    dist.world().barrier()
    if rank == 0:
        file = Path(folder, "000002", "rank_00001.bin")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.world().barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        state = load(folder, {"x": torch.zeros(3_000_000)})
    dist.shutdown()
    return state["step"], state["x"].unique().tolist()


def test_a_rank_that_reads_damage_does_not_keep_the_others_waiting(tmp_path):
    assert run_ranks(_damaged, 2, str(tmp_path)) == [(1, [1.0]), (1, [1.0])]


def _damaged_for_some(rank, world_size, folder):
    """Ranks 0 and 2 share a tensor, of which one reads the damage; rank 1 shares nothing."""
    dist.init()
    for step in (1, 2):
        save(folder, {f"x{rank % 2}": torch.full((3_000_000,), float(step)), "step": step})
    dist.world().barrier()
    if rank == 2:
        file = Path(folder, "000002", "rank_00002.bin")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.world().barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        state = load(folder, {f"x{rank % 2}": torch.zeros(3_000_000)})
    dist.shutdown()
    return state["step"], state[f"x{rank % 2}"].unique().tolist()


def test_damage_that_one_replica_of_a_shard_reads_sends_all_ranks_to_the_older_version(tmp_path):
    assert run_ranks(_damaged_for_some, 3, str(tmp_path), timeout_s=120) == [(1, [1.0])] * 3
