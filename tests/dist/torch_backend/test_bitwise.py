"""In rank order, torch's wrappers over our groups train to the same bits as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from echelon.dist import Options
from tests.dist.torch_backend.model import Gpt, loss_of, optimizer_of, train_alone
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_STEPS = 4


def _train(model: torch.nn.Module, rank: int) -> None:
    optimizer = optimizer_of(model)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _assert_same_bits(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.equal(whole, expected[name]), name


def _ddp_and_fsdp2(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("echelon", pg_options=Options(reduction="rank_ordered"))
    wrapped = DistributedDataParallel(Gpt(), bucket_cap_mb=0.01)  # several buckets
    _train(wrapped, rank)
    # DDP multiplies every gradient by 1/N before it is added.
    alone = train_alone(world_size, _STEPS, lambda g: g * (1.0 / world_size), lambda total: total)
    _assert_same_bits(wrapped.module, alone)

    sharded = Gpt()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    _train(sharded, rank)
    # FSDP2 asks for an average: the sum, then one division.
    alone = train_alone(world_size, _STEPS, lambda g: g, lambda total: total / world_size)
    _assert_same_bits(sharded, alone)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp_and_fsdp2_equal_one_process_bit_for_bit(world_size):
    run_ranks(_ddp_and_fsdp2, world_size, timeout_s=60)
