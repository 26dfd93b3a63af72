"""Every kind of parameter trains as in one process: tied, frozen, unused, ignored, meta, cast."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
STEPS = 3


class Tower(nn.Module):
    """Blocks of several kinds, with what goes wrong elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leg()
        self.second = Leg()
        self.third = Leg()
        self.third.inner.weight = self.first.inner.weight  # tied across units
        self.second.twin.weight = self.second.inner.weight  # tied within one
        self.second.inner.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dims
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x, skip=False):
        x = self.second(self.first(x))
        return self.third(x, skip=skip) * self.scale + self.empty.sum()


class Leg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 13)
        self.twin = nn.Linear(13, 13)
        self.unused = nn.Linear(13, 5)
        self.sometimes = nn.Linear(13, 13)

    def forward(self, x, skip=False):
        x = x + torch.tanh(self.twin(F.gelu(self.inner(x))))
        return x if skip else x + self.sometimes(x)


def make() -> Tower:
    torch.manual_seed(3)
    return Tower()


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 13, generator=generator)
    return model(x, skip=rank == 1).square().mean()


def one_process(size, loss=loss_of, model=None):
    model = make() if model is None else model
    optimizer = models.make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = {}
        for rank in range(size):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = p.grad if name not in total else total[name] + p.grad
        for name, p in model.named_parameters():
            p.grad = total[name] / size if name in total else None
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def different(model, expected):
    from echelon.dist.fsdp import full_state_dict

    state = full_state_dict(model)
    assert list(state) == list(expected)
    return [name for name in expected if not torch.equal(state[name], expected[name])]


def sharded_tower(**settings):
    from echelon.dist.fsdp import fully_shard

    model = make()
    for leg in (model.first, model.second, model.third):
        fully_shard(leg, **settings)
    return fully_shard(model, **settings)


def train(model, rank, loss=loss_of):
    optimizer = models.make_optimizer(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
    return model


def _tower(rank, size):
    models.join()
    for settings in ({}, {"reshard_after_forward": False}):
        model = train(sharded_tower(**settings), rank)
        assert different(model, one_process(size)) == [], settings
        assert model.first.unused.weight.grad is None
    dist.shutdown()


def test_tied_frozen_and_unused_parameters():
    """Also used on some ranks only: `sometimes` gets no gradient on rank 1."""
    run_ranks(_tower, 2)
    run_ranks(_tower, 3)


def _thawed(rank, size):
    from echelon.dist.fsdp import fully_shard

    models.join()

    def steps(model, run):
        for thaw in (False, True):
            model.second.twin.bias.requires_grad_(thaw)
            run(model)

    expected = make()
    steps(expected, lambda model: one_process(size, model=model))
    model = sharded_tower()
    steps(model, lambda model: train(model, rank))
    assert different(model, expected.state_dict()) == []
    kept = make()
    mine = nn.Parameter(torch.full((13, 13), float(rank)))
    kept.first.sometimes.weight = mine
    fully_shard(kept, ignored_params=[mine])
    assert kept.first.sometimes.weight is mine
    loss_of(kept, 0, 0).backward()
    assert mine.grad.shape == (13, 13)
    dist.shutdown()


def test_thawed_and_ignored_parameters():
    run_ranks(_thawed, 2)


def _meta(rank, size):
    from echelon.dist.fsdp import full_state_dict, fully_shard

    models.join()
    with torch.device("meta"):
        model = models.Gpt()
    torch.manual_seed(40 + rank)  # rank 0's values are everyone's
    for block in model.blocks:
        fully_shard(block)
        assert not any(p.is_meta for p in block.parameters())
    fully_shard(model)
    assert model.head.weight is model.token.weight
    state = full_state_dict(model)
    for name in models.Block().state_dict():
        if "norm" not in name:
            assert state[f"blocks.0.{name}"].std() > 0
        assert torch.isfinite(state[f"blocks.0.{name}"]).all()
    plain = models.make()
    plain.load_state_dict(state)
    alone = models.train_alone(size, 1, model=plain)
    models.loss_of(model, rank).backward()
    models.make_optimizer(model).step()
    assert different(model, alone) == []

    bare = nn.Module()
    bare.values = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="no reset_parameters"):
        fully_shard(bare)
    bare = nn.Module()
    bare.values = nn.Parameter(torch.zeros(3, device="meta"))
    fully_shard(bare, init=lambda module: module.values.fill_(2.0))
    assert torch.equal(full_state_dict(bare)["values"], torch.full((3,), 2.0))
    dist.shutdown()
    return {name: value.sum().item() for name, value in state.items()}


def test_a_model_on_the_meta_device_is_made_unit_by_unit():
    first, second = run_ranks(_meta, 2)
    assert first == second


def _mixed(rank, size):
    from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

    models.join()
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    model = models.make()
    for block in model.blocks:
        fully_shard(
            block,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
    fully_shard(model, mp_policy=precision)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.blocks[1].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    optimizer = models.make_optimizer(model)

    masters = models.make()
    plain_optimizer = models.make_optimizer(masters)
    for step in range(STEPS):
        totals = []
        for other in range(size):
            copy = models.make().to(torch.bfloat16)
            copy.load_state_dict({k: v.bfloat16() for k, v in masters.state_dict().items()})
            models.loss_of(copy, step * size + other).backward()
            totals.append([p.grad.float() for p in copy.parameters()])
        for p, *parts in zip(masters.parameters(), *totals, strict=True):
            p.grad = sum(parts[1:], parts[0]) / size
        plain_optimizer.step()

        ids, targets = models.batch(step * size + rank)
        output = model(ids)
        assert output.dtype == torch.float32
        F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert different(model, masters.state_dict()) == []
    dist.shutdown()


def test_mixed_precision_equals_one_process_with_float32_masters():
    run_ranks(_mixed, 2)


def _replicated(rank, size):
    from echelon.dist.fsdp import clip_grad_norm_, fully_shard
    from echelon.dist.mesh import DeviceMesh

    models.join()
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    model = models.make()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = models.make_optimizer(model)

    expected = models.make()
    plain = models.make_optimizer(expected)
    for step in range(STEPS):
        pairs = []
        for first in (0, 2):
            total = None
            for other in (first, first + 1):
                plain.zero_grad()
                models.loss_of(expected, step * size + other).backward()
                gradients = [p.grad for p in expected.parameters()]
                total = (
                    gradients
                    if total is None
                    else [a + b for a, b in zip(total, gradients, strict=True)]
                )
            pairs.append(total)
        for p, left, right in zip(expected.parameters(), *pairs, strict=True):
            p.grad = (left + right) / size
        norm = torch.nn.utils.get_total_norm([p.grad for p in expected.parameters()])
        plain.step()
        optimizer.zero_grad()
        models.loss_of(model, step * size + rank).backward()
        assert clip_grad_norm_(model, float("inf")) == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
    assert different(model, expected.state_dict()) == []
    dist.shutdown()


def test_a_mesh_of_replicas_equals_one_process():
    """Sums go within each shard group first, then over the replicas."""
    run_ranks(_replicated, 4)
