"""Models that are deleted: nothing of them stays, and the others train as if they had not been."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.fsdp import fully_shard, gradient_sync  # noqa: E402
from echelon.dist.fsdp.parameters.member import member_of  # noqa: E402
from echelon.dist.fsdp.parameters.unit import units_of  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WIDTH = 48


class Block(nn.Module):
    """Two inputs, so that several gradients are waited for."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, skip):
        return x + self.down(torch.tanh(self.up(x))) + 0.5 * skip


class Net(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        first = x
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


def make(seed, width=WIDTH):
    torch.manual_seed(seed)
    return Net(width)


def shard(model, **settings):
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def data(step, rank, width=WIDTH):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, steps, rank):
    for step in steps:
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()


def alone(seed, steps, world_size):
    """Train in one process; return the parameters."""
    model = make(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(data(step, rank)).square().mean() / world_size).backward()
        optimizer.step()
    return list(model.parameters())


def check_equal(model, expected):
    from echelon.dist.fsdp import full_state_dict

    whole = full_state_dict(model)
    for value, other in zip(whole.values(), expected, strict=True):
        torch.testing.assert_close(value, other.detach(), rtol=1e-6, atol=1e-7)


# ---- what is freed ----


def _resident():
    gc.collect(), gc.collect()  # the second frees graphs that a module stored
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def watched(model):
    """Return weak references to all that sharding made for a model, and to the model."""
    things = [model, *model.modules()]
    for unit in units_of(model):
        things += [unit, unit.entry, *unit.flats, *(flat.full for flat in unit.flats)]
        things += [flat.chunk for flat in unit.flats]
        for member in unit.members:
            things += [member, member.shard, member.leaf]
            assert member_of(member.leaf) is member
    return [weakref.ref(thing) for thing in things]


def _cycle(rank, how):
    """Make a model of 3 MiB, use it in some way, delete it; return what should be gone."""
    model = shard(make(2, width=256))
    refs = watched(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(data(0, rank, 256)).square().mean().backward()
        optimizer.step()
    if how == "evaluated":
        with torch.no_grad():
            model(data(0, rank, 256))
    if how == "stored":  # the module refers to the graph, which refers to the unit
        model.last = model(data(0, rank, 256))
        model.blocks[0].last = model.blocks[0](*[data(0, rank, 256).requires_grad_()] * 2)
    if how == "dropped":
        model(data(0, rank, 256))
    if how == "accumulated":
        with gradient_sync(model, enabled=False):
            model(data(0, rank, 256)).sum().backward()
    if how == "raised":
        with pytest.raises(RuntimeError):
            model(data(0, rank, 128))
    if how == "died":
        value = model(data(0, rank, 256))
        value.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            value.sum().backward()
    return refs


def _freed(rank, size):
    models.join()
    gc.freeze()  # what is collected from here on is ours, and quickly
    keeper = shard(make(1))  # another model on the group goes on
    others = torch.optim.SGD(keeper.parameters(), lr=0.02)
    resident = []
    ways = ["trained", "evaluated", "stored", "dropped", "accumulated", "raised", "died"]
    for step, how in enumerate([*ways, "trained"]):
        train(keeper, others, [step], rank)
        refs = _cycle(rank, how)
        resident.append(_resident())
        assert not [ref for ref in refs if ref() is not None], how
    check_equal(keeper, alone(1, range(len(ways) + 1), size))
    dist.shutdown()
    return resident


def test_a_deleted_model_leaves_nothing():
    """Seven models of 3 MiB of shards, and as much again of gradients and of each moment."""
    for first, *later in run_ranks(_freed, 1):
        assert max(later) - first < 4 * (3 << 20)


# ---- what goes on ----


def _order(rank, size, names, collects):
    """Train and delete models in an order that `names` tells; lower case trains, upper deletes."""
    models.join()
    gc.freeze()  # what is collected from here on is ours, and quickly
    gc.disable()
    living, steps = {}, {}
    for name in names:
        key = name.lower()
        if name == "*":
            if rank in collects:
                gc.collect()
        elif name == key:
            if key not in living:
                model = shard(make(ord(key)))
                living[key] = model, torch.optim.SGD(model.parameters(), lr=0.02)
                steps[key] = 0
            train(*living[key], [steps[key]], rank)
            steps[key] += 1
        else:
            model, _ = living.pop(key)
            check_equal(model, alone(ord(key), range(steps[key]), size))
            model.me = model  # only the garbage collector frees it
            model(data(0, rank))  # its backward never comes
            del model
    for key, (model, _) in living.items():
        check_equal(model, alone(ord(key), range(steps[key]), size))
    dist.shutdown()


@pytest.mark.parametrize("names", ["aabA*bbc*cbB*ccC*da", "abcabcC*abB*caA*c"])
def test_models_come_and_go_in_any_order_whenever_ranks_collect_garbage(names):
    run_ranks(_order, 2, names, (1,))
