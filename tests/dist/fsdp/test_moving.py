"""A sharded model is divided among other ranks in place, after a step that failed."""

from __future__ import annotations

import pytest
import torch

import echelon.dist as dist
from echelon.dist.fsdp import full_state_dict, fully_shard, shards
from echelon.dist.fsdp.moving import move, near_size_in
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.train.same_bits import SameBits, fingerprint
from tests.support.ranks import run_ranks
from tests.train.same_bits.model import loss_of, make, shard

pytestmark = pytest.mark.ranks

_MICRO_BATCHES = 6


def _fill(model, values):
    for name, part in shards(model).items():
        part.data.copy_(values[name].reshape(-1)[part.start : part.start + part.length])


def _train(model, optimizer, group, steps):
    same = SameBits(model, optimizer, micro_batches=_MICRO_BATCHES, group=group, seed=7)
    for step in steps:
        same.backward(step, lambda n, step=step: loss_of(model, step, n, _MICRO_BATCHES))
        optimizer.step()


def _fail_in_a_backward(model):
    def fail(_):
        raise RuntimeError("torn")

    def watch(block, inputs, output):
        output.register_hook(fail)

    handle = model.blocks[0].register_forward_hook(watch)
    with pytest.raises(RuntimeError, match="torn"):
        loss_of(model, 1, 0, _MICRO_BATCHES).backward()
    handle.remove()


def _move(rank, size):
    """Fail within a backward, go from 3 ranks to 2, and train there."""
    world = dist.init("shm", timeout_s=60)
    model = shard(make(), "sharded", world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, world, [0])
    values = full_state_dict(model)
    _fail_in_a_backward(model)
    small = dist.new_group([0, 2])
    found = None
    if small is not None:
        move(model, small)
        _fill(model, values)
        _train(model, optimizer, small, [1])
        found = fingerprint(model, optimizer)
    world.barrier()
    dist.shutdown()
    return found


def _whole(rank, size):
    world = dist.init(timeout_s=60)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, world, [0, 1])
    found = fingerprint(model, optimizer)
    dist.shutdown()
    return found


def test_a_model_trains_on_with_the_same_bits_among_fewer_ranks():
    (whole,) = run_ranks(_whole, 1)
    first, _, last = run_ranks(_move, 3)
    assert first == last == whole


@pytest.mark.parametrize(
    ("requested", "group_size", "found"),
    [(0, 4, 0), (2, 4, 2), (2, 3, 0), (2, 9, 3), (4, 6, 0), (3, 8, 4), (1, 5, 1), (2, 1, 0)],
)
def test_no_rank_keeps_a_larger_part_than_was_requested(requested, group_size, found):
    assert near_size_in(requested, group_size) == found


def _keep_near(rank, size):
    """Go from 3 ranks to 2 with a part that a rank keeps for itself, and train there."""
    world = dist.init("shm", timeout_s=60)
    model = make()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = full_state_dict(model)
    loss_of(model, 0, 0, _MICRO_BATCHES).backward()
    small = dist.new_group([0, 2])
    found = None
    if small is not None:
        move(model, small)
        _fill(model, values)
        gathered = small.num_collectives
        torch.manual_seed(1)  # of the dropout
        loss_of(model, 0, 0, _MICRO_BATCHES).backward()
        gathered = small.num_collectives - gathered
        optimizer.step()
        sizes = [unit.near.size if unit.near else 0 for unit in units_of(model)]
        found = fingerprint(model, optimizer), gathered, sizes
    world.barrier()
    dist.shutdown()
    return found


def _whole_step(rank, size):
    dist.init(timeout_s=60)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    loss_of(model, 0, 0, _MICRO_BATCHES).backward()
    optimizer.step()
    found = fingerprint(model, optimizer)
    dist.shutdown()
    return found


def test_ranks_of_the_new_group_gather_again_from_what_they_kept():
    (whole,) = run_ranks(_whole_step, 1)
    first, _, last = run_ranks(_keep_near, 3)
    num_units = 3
    assert first == last == (whole, num_units, [0, 1, 1])
