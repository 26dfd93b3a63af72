"""A sharded model is divided among other ranks in place, after a step that failed."""

from __future__ import annotations

import pytest
import torch

import echelon.dist as dist
from echelon.dist.fsdp import full_state_dict, shards
from echelon.dist.fsdp.moving import move
from echelon.train.same_bits import SameBits, fingerprint
from tests.ranks import run_ranks
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
