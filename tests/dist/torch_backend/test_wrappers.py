"""Torch's own parallelism, unmodified, over our groups: the same results as in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.dist.torch_backend.model import Gpt, loss_of, plain_optimizer_of, train_alone
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_STEPS = 3


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("echelon")


def _train(model: nn.Module, rank: int) -> None:
    optimizer = plain_optimizer_of(model)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _alone(world_size: int) -> dict[str, torch.Tensor]:
    model = train_alone(
        world_size, _STEPS, lambda g: g, lambda total: total / world_size, plain_optimizer_of
    )
    return dict(model.named_parameters())


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _assert_close(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(_whole(parameter), expected[name], rtol=1e-5, atol=1e-6)


def _sharded(mesh: Any = None, **options: Any) -> Gpt:
    model = Gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


# ---- sharding ----


def _hsdp(rank: int, world_size: int) -> None:
    _begin()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh)
    _train(model, rank)
    _assert_close(model, _alone(world_size))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(norm.full_tensor())
    dist.destroy_process_group()


def test_hsdp():
    run_ranks(_hsdp, 4, timeout_s=60)


def _with_options(mesh: Any, rank: int) -> list[torch.Tensor]:
    """Train in bf16 with prefetch and two batches a step; return the weights."""
    model = _sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    optimizer = plain_optimizer_of(model)
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss_of(model, step, rank).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [_whole(parameter).detach() for parameter in model.parameters()]


def _fsdp2_options(rank: int, world_size: int) -> None:
    _begin()
    ours = _with_options(None, rank)
    gloo = dist.new_group(backend="gloo")
    theirs = _with_options(DeviceMesh.from_group(gloo, "cpu"), rank)
    before = list(Gpt().parameters())
    assert not any(torch.equal(one, was) for one, was in zip(ours, before, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)  # sums of two are rounded once
    dist.destroy_process_group()


def test_fsdp2_with_mixed_precision_prefetch_and_accumulation():
    run_ranks(_fsdp2_options, 2, timeout_s=60)


# ---- data parallel with everything that DDP calls besides the plain all_reduce ----


class _Uneven(nn.Module):
    """One rank leaves a layer out; an embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.EmbeddingBag(11, 4, sparse=True)
        self.used, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        hidden = self.norm(self.used(self.words(x)))
        return (self.rare(hidden) if rare else hidden).square().mean()


def _ddp(rank: int, world_size: int) -> None:
    _begin()
    model = DistributedDataParallel(_Uneven(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([[rank, step, 5]] * 2), rare=rank == 0).backward()
    grads = {name: p.grad.to_dense() for name, p in model.module.named_parameters()}
    alone = [_Uneven() for _ in range(world_size)]
    for other, one in enumerate(alone):
        one(torch.tensor([[other, 2, 5]] * 2), rare=other == 0).backward()
    for name, grad in grads.items():
        theirs = [dict(one.named_parameters())[name].grad for one in alone]
        known = [one.to_dense() for one in theirs if one is not None]
        torch.testing.assert_close(grad, sum(known) / world_size, msg=name)
    assert any(bool(grad.any()) for grad in grads.values())

    plain = DistributedDataParallel(nn.Linear(3, 3, bias=False))
    num_batches = 2 + rank  # rank 1 has more than the others
    seen = []
    with plain.join():
        for _ in range(num_batches):
            plain.zero_grad()
            plain(torch.ones(1, 3)).sum().backward()
            seen.append(plain.module.weight.grad.clone())
    assert len(seen) == num_batches
    for batch, grad in enumerate(seen):  # a sum over ranks with batches left, divided by all
        torch.testing.assert_close(grad, torch.full((3, 3), 1.0 if batch < 2 else 0.5))
    dist.destroy_process_group()


def test_ddp_with_unused_and_sparse_parameters_and_uneven_inputs():
    run_ranks(_ddp, 2, timeout_s=60)


def _hooks(rank: int, world_size: int) -> None:
    _begin()
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    for hook, its_state, tolerance in (
        # it waits for futures within callbacks of futures, and keeps one rank of each matrix
        (power_sgd.powerSGD_hook, state, 0.3),
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (default_hooks.allreduce_hook, None, 1e-6),
    ):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        model = DistributedDataParallel(copy.deepcopy(plain))
        model.register_comm_hook(its_state, hook)
        for step in range(5):
            model.zero_grad()
            model(torch.full((2, 30), float(rank + step))).square().mean().backward()
        for other in range(world_size):  # of the last step, added up
            (plain(torch.full((2, 30), other + 4.0)).square().mean() / world_size).backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            off = (parameter.grad - expected.grad).norm() / expected.grad.norm()
            assert off < tolerance, (hook, off)
            everyone = [torch.empty_like(parameter.grad) for _ in range(world_size)]
            dist.all_gather(everyone, parameter.grad)
            assert all(torch.equal(other, parameter.grad) for other in everyone)
    dist.destroy_process_group()


def test_ddp_with_communication_hooks():
    run_ranks(_hooks, 2, timeout_s=60)


# ---- tensors spread over ranks ----


def _tensor_parallel(rank: int, world_size: int) -> None:
    _begin()
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
    x = torch.randn(5, 6)
    expected = model(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = model(x)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad)

    whole = torch.arange(35.0).view(7, 5)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal((rows.t() @ rows).full_tensor(), whole.t() @ whole)
    assert torch.equal(rows.sum().full_tensor(), whole.sum())
    dist.destroy_process_group()


def test_tensor_parallel_and_dtensor():
    run_ranks(_tensor_parallel, 3, timeout_s=60)


# ---- pipelines ----

_SINGLE = ("ScheduleGPipe", "Schedule1F1B")
_MULTI = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def _pipelines(rank: int, world_size: int) -> None:
    _begin()
    for name in (*_SINGLE, *_MULTI, *_V):
        num_stages = world_size * (1 if name in _SINGLE else 2)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_stages)]
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        reference = functional.mse_loss(nn.Sequential(*layers)(x), target)
        reference.backward()
        grads = [[p.grad.clone() for p in layer.parameters()] for layer in layers]
        for layer in layers:
            layer.zero_grad()
        mine = [rank] if name in _SINGLE else [rank, rank + world_size]
        if name in _V:
            mine = [rank, 2 * world_size - 1 - rank]
        stages = [PipelineStage(layers[i], i, num_stages, torch.device("cpu")) for i in mine]
        make = getattr(schedules, name)
        schedule = make(stages[0] if name in _SINGLE else stages, 4, loss_fn=functional.mse_loss)
        losses: list[torch.Tensor] = []
        holds_last = num_stages - 1 in mine
        schedule.step(
            *((x,) if 0 in mine else ()),
            **({"target": target, "losses": losses} if holds_last else {}),
        )
        if holds_last:
            torch.testing.assert_close(torch.stack(losses).mean(), reference)
        for i in mine:
            for parameter, grad in zip(layers[i].parameters(), grads[i], strict=True):
                torch.testing.assert_close(parameter.grad, grad, msg=name)
    dist.destroy_process_group()


def test_all_seven_pipeline_schedules():
    run_ranks(_pipelines, 2, timeout_s=60)


# ---- checkpoints ----


def _save_and_load(rank: int, world_size: int, folder: str) -> None:
    _begin()
    model = _sharded()
    _train(model, rank)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=Path(folder, "now"))
    host = dist.new_group()  # async_save wants a group that carries host memory
    later = dcp.async_save(
        {"model": state}, checkpoint_id=Path(folder, "later"), process_group=host
    )
    later.result(timeout=30)
    for name in ("now", "later"):
        fresh = _sharded()
        loaded = {"model": get_model_state_dict(fresh)}
        dcp.load(loaded, checkpoint_id=Path(folder, name))
        for key, value in loaded["model"].items():
            assert torch.equal(value.full_tensor(), state[key].full_tensor()), key
    dist.destroy_process_group()


def test_checkpoints_of_dcp(tmp_path):
    run_ranks(_save_and_load, 2, str(tmp_path), timeout_s=60)
