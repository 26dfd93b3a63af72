"""A rank's shards as one vector of bytes, and shards restored from it."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.parts import exposed_storages, sharded_parts
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


def test_scalars_are_restored_and_are_not_encoded_one_by_one(trained):
    model, optimizer = trained
    counts = [optimizer.state[one]["step"] for one in model.parameters()]
    for number, count in enumerate(counts):
        count.fill_(number)
    optimizer.state[model[0].weight]["other"] = torch.tensor(7, dtype=torch.int64)
    optimizer.state[model[0].bias]["name"] = "first"
    before = _state(model, optimizer)
    writer = _writer(model, optimizer)
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
    restore = ShardsRestore(sharded_parts(model), optimizer)
    restore.add(vector)
    restore.finish()
    after = _state(model, optimizer)
    assert str(after) == str(before)
    assert optimizer.state[model[0].bias]["name"] == "first"
    counts = [optimizer.state[one]["step"] for one in model.parameters()]
    assert len({one.untyped_storage().data_ptr() for one in counts}) == len(counts)


def _writer(model, optimizer):
    parts = sharded_parts(model)
    return ShardsWriter(parts, optimizer, exposed=exposed_storages([model], parts))


def _state(model, optimizer):
    """Copy parameters and optimizer state, in order, with dtypes."""
    found = []
    for parameter in model.parameters():
        found.append(parameter.detach().clone())
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found.append((key, value.dtype, value.clone()))
    return found


def test_an_index_cannot_run_code(trained, tmp_path):
    """A copy may come from another host, so the bytes of its index are only data."""

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    head = pickle.dumps(Harmful())
    vector = torch.frombuffer(
        bytearray(len(head).to_bytes(8, "little") + head + bytes(64)), dtype=torch.uint8
    )
    with pytest.raises(ValueError):  # noqa: PT011 -- of whichever part is wrong first
        ShardsRestore(sharded_parts(trained[0]), trained[1]).add(vector)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        None,
        (1, "two", [3]),
        2**70,
        np.float32(0.5),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        OrderedDict(b=1, a=2),
        Counter("abca"),
        torch.arange(5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.ones(2, 4).t(),
        [torch.tensor(True), torch.tensor([1 + 2j])],
    ],
    ids=str,
)
def test_a_value_of_the_optimizer_arrives_with_its_type(trained, value):
    model, optimizer = trained
    optimizer.state[model[1].bias]["extra"] = value
    writer = _writer(model, optimizer)
    vector = torch.empty(writer.num_bytes, dtype=torch.uint8)
    writer.write(vector)
    optimizer.state[model[1].bias]["extra"] = None
    restore = ShardsRestore(sharded_parts(model), optimizer)
    restore.add(vector)
    restore.finish()
    found = optimizer.state[model[1].bias]["extra"]
    vector.zero_()  # nothing that was restored may lie in the buffer
    assert type(found) is type(value)
    assert pickle.dumps(_plain(found)) == pickle.dumps(_plain(value))


def test_a_value_that_cannot_be_copied_exactly_is_refused_by_name(trained):
    model, optimizer = trained
    optimizer.state[model[1].bias]["extra"] = {1, 2}
    with pytest.raises(ValueError, match=r"the optimizer's state.*1\.bias.*extra.*has type set"):
        _writer(model, optimizer)


def _plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), str(value.tolist())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list) else value
