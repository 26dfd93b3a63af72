"""Tensors on NVIDIA GPUs under torch go over our nccl backend. Needs a GPU for each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _on_gpus(rank: int, world_size: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("echelon")
    x = torch.full((1000,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    total = sum(range(1, world_size + 1))
    assert x.eq(total).all()
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    assert (work.get_future().wait()[0] * 2).eq(2 * total).all()
    flags = torch.tensor([rank == 0, True, False], device="cuda")
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.BOR):
        dist.all_reduce(flags, op)
        assert flags.tolist() == [True, True, False]
    host = torch.full((3,), float(rank))
    dist.all_reduce(host)  # the host's arrays go another way in the same group
    assert host.eq(sum(range(world_size))).all()
    torch.manual_seed(0)
    plain = nn.Linear(64, 64).cuda()
    sharded = nn.Linear(64, 64).cuda()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded)
    inputs = torch.randn(8, 64, device="cuda")
    DistributedDataParallel(plain)(inputs).square().mean().backward()
    sharded(inputs).square().mean().backward()
    torch.testing.assert_close(sharded.weight.grad.full_tensor(), plain.weight.grad)
    dist.destroy_process_group()


def test_wrappers_on_gpus():
    run_ranks(_on_gpus, min(torch.cuda.device_count(), 2), timeout_s=120)
