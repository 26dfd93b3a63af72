"""Torch's own helpers do on shards what they do on whole parameters, or refuse by name."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_ as imported_before  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def pair():
    """Return a sharded model, and the same whole."""
    from echelon.dist.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    return fully_shard(model), plain


def _clip(rank, size):
    from echelon.dist.fsdp import clip_grad_norm_

    models.join()
    model, plain = pair()
    x = torch.ones(4, 8)
    for one in (model, plain):
        one(x).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(ValueError, match="clip_grad_norm_"):
        nn.utils.get_total_norm(gradients)
    with pytest.raises(ValueError, match="clip_grad_norm_"):
        imported_before(model.parameters(), 1.0)
    expected = float(imported_before(plain.parameters(), 1.0))
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(expected)
    norm = clip_grad_norm_(model, float("inf"))
    assert norm == pytest.approx(1.0, rel=1e-4)
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 9.0)) == pytest.approx(1.0, rel=1e-4)
    dist.shutdown()
    return norm


def test_torchs_clipping_takes_the_norm_of_all_shards():
    first, second = run_ranks(_clip, 2)
    assert first == second


def _zero(rank, size):
    from echelon.dist.fsdp import clip_grad_norm_

    models.join()
    model, plain = pair()
    for one in (model, plain):
        one(torch.ones(4, 8)).sum().backward()
        loss = one(torch.ones(4, 8) / 2).sum()
        one.zero_grad()
        loss.backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert clip_grad_norm_(model, 1e9) == pytest.approx(expected)
    dist.shutdown()


def test_zero_grad_between_forward_and_backward_clears_the_shards():
    run_ranks(_zero, 2)


def _scaler(rank, size):
    models.join()
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.ones(4, 8)).sum()).backward()
    if rank == 1:
        next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    scales = [scaler.get_scale()]
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 8)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
    assert any(moved)
    dist.shutdown()
    return [*scales, scaler.get_scale()]


def test_a_gradient_scaler_skips_the_step_on_all_ranks_or_on_none():
    assert run_ranks(_scaler, 2) == [[1.0, 1.0], [1.0, 1.0]]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        return self.expert(self.dense(x))


def _experts(rank, size):
    from echelon.dist.fsdp import clip_grad_norm_, fully_shard

    models.join()
    world = dist.world()
    torch.manual_seed(0)
    model = Experts()
    fully_shard(model.expert, group=world.split(rank))
    fully_shard(model, group=world)
    model(torch.ones(4, 8) * (rank + 1)).sum().backward()
    mine = sum(float(p.grad.square().sum()) for p in model.parameters())
    norm = clip_grad_norm_(model, 1e9)
    assert norm == pytest.approx(sum(world.all_gather_object(mine)) ** 0.5)
    alone = world.split(rank)
    stage = fully_shard(nn.Linear(2, 2), group=alone)
    stage(torch.ones(1, 2) * (rank + 1)).sum().backward()
    square = clip_grad_norm_(stage, 1e9) ** 2
    squares = world.all_gather_object(square)
    assert clip_grad_norm_(stage, 1e9, over=world) == pytest.approx(sum(squares) ** 0.5)
    with pytest.raises(ValueError, match="must contain all ranks"):
        clip_grad_norm_(model, 1.0, over=alone)
    dist.shutdown()
    return norm


def test_experts_on_groups_of_their_own_count_once_and_the_norm_is_equal_everywhere():
    first, second = run_ranks(_experts, 2)
    assert first == second


# ---- what autograd sees ----


def _net():
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def _sharded(model):
    from echelon.dist.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _seen_by_autograd(rank, size):
    from echelon.dist.fsdp import full_state_dict, fully_shard

    models.join()
    x = torch.arange(8.0).view(2, 4) / 8
    # inputs= names shards; the rest is frozen between forward and backward, and thawed again
    plain, model = _net(), _sharded(_net())
    hooked = []
    for one in (plain, model):
        chosen = [one[0].weight, one[2].bias]
        chosen[0].register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.clone()))
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            loss = one(x + step).square().mean()
            one[1].requires_grad_(step == 2)
            loss.backward(inputs=chosen if step < 2 else None)
            optimizer.step()
            assert (one[1].weight.grad is not None) == (step == 2)
            one[1].requires_grad_(True)
    for value, expected in zip(
        full_state_dict(model).values(), plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    assert len(hooked) == 6  # on shards too, with their part of the gradient
    mine = model[0].weight.numel()
    assert sum(gradient.numel() for gradient in hooked) == 3 * 16 + 3 * mine

    with pytest.raises(ValueError, match="cannot yield the gradient of shard 'weight': use backw"):
        torch.autograd.grad(model(x).sum(), list(model[0].parameters()), allow_unused=True)
    got = torch.autograd.grad(model(x.requires_grad_()).sum(), {"x": x})
    assert got["x"].shape == x.shape
    with pytest.raises(ValueError, match=r"'weight' has sparse gradients .*use sparse=False"):
        fully_shard(nn.Embedding(4, 4, sparse=True))

    class Lookup(nn.Linear):
        def forward(self, ids):
            return torch.nn.functional.embedding(ids, self.weight, sparse=True)

    table = fully_shard(Lookup(4, 4, bias=False))
    with pytest.raises(RuntimeError, match="gradient of 'weight' in unit 'Lookup' is sparse"):
        table(torch.tensor([1])).sum().backward()

    model = _sharded(_net())
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match=r"shard 'weight' has a hook from register_hook\(\)"):
        model(x)
    layer = nn.Linear(2, 2)
    layer.bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match="parameter 'bias' has a hook from register_hook"):
        fully_shard(layer)
    model = _sharded(_net())
    model[1].register_forward_pre_hook(lambda *_: model.state_dict() and None)
    with pytest.raises(RuntimeError, match="state of unit 'Sequential' was read or set during"):
        model(x)
    model = _sharded(_net())
    value = model[0](x)
    value.register_hook(lambda _: model.state_dict() and None)
    with pytest.raises(RuntimeError, match=r"state of unit .* read or set the state between steps"):
        model[1](value).sum().backward()
    assert len(model.state_dict()) == 6
    dist.shutdown()


def test_what_autograd_does_with_shards_works_or_is_refused_by_name():
    run_ranks(_seen_by_autograd, 2, timeout_s=120)
