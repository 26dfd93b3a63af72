"""A rank's shards as one vector of bytes, and shards restored from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.shards import ShardsReader, ShardsRestore, ShardsWriter


@pytest.fixture
def trained():
    """A sharded model on one rank, and its optimizer after a step."""
    dist.init()
    try:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]))
        optimizer = torch.optim.AdamW(model.parameters())
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        yield model, optimizer
    finally:
        dist.shutdown()


def test_scalars_are_restored_and_are_not_pickled_one_by_one(trained):
    model, optimizer = trained
    counts = [optimizer.state[one]["step"] for one in model.parameters()]
    for number, count in enumerate(counts):
        count.fill_(number)
    optimizer.state[model[0].weight]["other"] = torch.tensor(7, dtype=torch.int64)
    optimizer.state[model[0].bias]["name"] = "first"
    before = _state(model, optimizer)
    writer = ShardsWriter(model, optimizer)
    vector = torch.empty(writer.num_bytes, dtype=torch.uint8)
    writer.write(vector)
    values = ShardsReader(vector).index.values
    assert [one for one in values.values() if one] == [{"name": "first"}]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    restore = ShardsRestore(model, optimizer)
    restore.add(vector)
    restore.finish()
    after = _state(model, optimizer)
    assert str(after) == str(before)
    assert optimizer.state[model[0].bias]["name"] == "first"
    counts = [optimizer.state[one]["step"] for one in model.parameters()]
    assert len({one.untyped_storage().data_ptr() for one in counts}) == len(counts)


def _state(model, optimizer):
    """Copy parameters and optimizer state, in order, with dtypes."""
    found = []
    for parameter in model.parameters():
        found.append(parameter.detach().clone())
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found.append((key, value.dtype, value.clone()))
    return found
