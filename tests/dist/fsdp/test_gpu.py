"""The same on devices: resized storages, a group's own streams, shards on the host.

Runs on as many ranks as there are devices, two at most.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


def _loss(model, index):
    ids, targets = models.batch(index)
    logits = model(ids.cuda()).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.cuda().flatten())


def _device(rank, size, offload, reshard):
    from echelon.dist.fsdp import CPUOffloadPolicy, clip_grad_norm_, full_state_dict, fully_shard
    from echelon.dist.fsdp.parameters.unit import unit_of

    torch.cuda.set_device(rank)
    dist.init("nccl")
    model = models.make().cuda()
    settings = {
        "offload_policy": CPUOffloadPolicy() if offload else None,
        "reshard_after_forward": reshard,
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    storages = [unit_of(block).flats[0].full.tensor.untyped_storage() for block in model.blocks]
    assert all(storage.size() == 0 for storage in storages)
    optimizer = models.make_optimizer(model)
    expected = models.make().cuda()
    plain = models.make_optimizer(expected)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step * size + rank).backward()
        assert all(storage.size() == 0 for storage in storages)
        norm = clip_grad_norm_(model, float("inf"))
        optimizer.step()
        plain.zero_grad()
        for other in range(size):
            (_loss(expected, step * size + other) / size).backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), float("inf"))
        assert norm == pytest.approx(float(plain_norm), rel=1e-4)
        plain.step()
    assert {p.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}
    state = full_state_dict(model)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), rtol=1e-4, atol=1e-5)
    dist.shutdown()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_on_devices(offload, reshard):
    run_ranks(_device, min(2, torch.cuda.device_count()), offload, reshard, timeout_s=120)
