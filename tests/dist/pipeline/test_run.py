"""The executor beyond gradients: what passes between stages, evaluation, mistakes, failures."""

import os

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.fsdp import GradScaler
from echelon.dist.pipeline import Pipeline, PlanError, Stage, schedule, split
from echelon.dist.pipeline.execute.batch import check_batch
from echelon.errors import CollectiveError
from tests.dist.pipeline.models import Reference, loss_fn, make_batch, make_stage
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Maker(nn.Module):
    """Passes on several tensors, one of them of integers and one that wants no gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.layer(x).t(), torch.arange(len(x)), scale


class User(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, count, scale):
        assert not scale.requires_grad
        return self.layer(x.t()).mul(scale).sum() + count.sum() * 0


def _several_tensors(group):
    """Tuples, views and integers pass; the module makes its own loss."""
    torch.manual_seed(0)
    modules = [Maker(), User()]
    plan = schedule("1f1b", 2, 3)
    pipe = Pipeline(
        [Stage(modules[group.rank], index=group.rank, num_stages=2)], group=group, schedule=plan
    )
    batch = torch.randn(6, 4), torch.arange(6.0)[:, None]
    losses = pipe.step(batch)
    torch.manual_seed(0)
    alike = [Maker(), User()]
    wanted = []
    for x, scale in zip(*(torch.tensor_split(one, 3) for one in _batch()), strict=True):
        wanted.append(alike[1](*alike[0](x, scale)))
        (wanted[-1] / 3).backward()
    for mine, theirs in zip(
        modules[group.rank].parameters(), alike[group.rank].parameters(), strict=True
    ):
        assert torch.equal(mine.grad, theirs.grad)
    if losses is not None:
        ours, theirs = ([one.item() for one in some] for some in (losses, wanted))
        assert ours == pytest.approx(theirs)


def _batch():
    torch.manual_seed(0)
    Maker(), User()
    return torch.randn(6, 4), torch.arange(6.0)[:, None]


def _gradients_add_up(group):
    """Two steps without zero_grad are one of twice the size; ties do not count the first twice."""
    reference = Reference(2, tied=True)
    first, last = (f"{i}:{n}" for i, n in ((0, "0.token.weight"), (1, "1.out.weight")))
    module = make_stage(group.rank, 2)
    pipe = Pipeline(
        [Stage(module, index=group.rank, num_stages=2)], group=group, schedule="gpipe",
        num_microbatches=2, loss_fn=loss_fn, ties=[[first, last]],
    )  # fmt: skip
    total = None
    for step in range(2):
        inputs, targets = make_batch(step, 4)
        pipe.step(inputs, targets)
        reference.train([(inputs, targets)], 2)
        grads = [p.grad.clone() for p in reference.stages[group.rank].parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    for mine, wanted in zip(module.parameters(), total, strict=True):
        assert torch.allclose(mine.grad, wanted, rtol=1e-5, atol=1e-7)


def _evaluation(group):
    reference = Reference(4, tied=False)
    plan = schedule("zbv", 2, 4)
    stages = [Stage(make_stage(i, 4), index=i, num_stages=4) for i in plan.stages_of(group.rank)]
    pipe = Pipeline(stages, group=group, schedule="zbv", num_microbatches=4, loss_fn=loss_fn)
    inputs, targets = make_batch(0, 6)
    losses, outputs = pipe.evaluate(inputs, targets), pipe.evaluate(inputs)
    pipe.step(inputs, targets)  # evaluating leaves nothing behind
    if not pipe.has_last:
        assert (losses, outputs) == (None, None)
        return
    x = inputs
    with torch.no_grad():
        for stage in reference.stages:
            x = stage(x)
    assert torch.allclose(torch.cat(outputs), x, atol=1e-6)
    assert not outputs[0].requires_grad
    assert len(losses) == 4
    parts = zip(x.tensor_split(4), targets.tensor_split(4), strict=True)
    wanted = [loss_fn(a, b).item() for a, b in parts]
    assert [one.item() for one in losses] == pytest.approx(wanted)


def _mistakes(group):
    """Each is told on the rank that makes it, before anything is sent."""
    module = nn.Linear(2, 2)
    stage = Stage(module, index=group.rank, num_stages=2)
    with pytest.raises(ValueError, match=r"plan '1f1b' puts stages \[\d\] on rank"):
        Pipeline([Stage(module, index=1 - group.rank, num_stages=2)], group=group,
                 num_microbatches=2)  # fmt: skip
    with pytest.raises(ValueError, match="'1f1b', which has 2 stages"):
        Pipeline([Stage(module, index=group.rank, num_stages=3)], group=group, num_microbatches=2)
    with pytest.raises(ValueError, match="needs num_microbatches"):
        Pipeline([stage], group=group)
    with pytest.raises(ValueError, match="is for 3 ranks, but the group has 2"):
        Pipeline([stage], group=group, schedule=schedule("1f1b", 3, 2))
    with pytest.raises(ValueError, match="num_microbatches must be 4 for plan '1f1b', got 2"):
        Pipeline([stage], group=group, schedule=schedule("1f1b", 2, 4), num_microbatches=2)
    with pytest.raises(ValueError, match="'0' does not name a copy of a parameter"):
        Pipeline([stage], group=group, num_microbatches=2, ties=[["0", "1:weight"]])
    with pytest.raises(ValueError, match=f"rank {1 - group.rank} has schedule '1f1b' with"):
        Pipeline([stage], group=group, num_microbatches=2 + group.rank)
    with pytest.raises(ValueError, match="group must be a ProcessGroup or None, got 'pp'"):
        Pipeline([stage], group="pp", num_microbatches=2)
    plan = schedule("1f1b", 2, 2)
    plan.rows[1].reverse()
    with pytest.raises(PlanError, match=r"row 1, column 0"):
        Pipeline([stage], group=group, schedule=plan)
    pipe = Pipeline([stage], group=group, num_microbatches=3, loss_fn=loss_fn)
    if group.rank == 0:
        for batch, said in [
            (None, "the rank of the first stage must pass inputs"),
            (torch.zeros(2, 2), "a batch of 2 cannot be split into 3"),
            ((torch.zeros(3, 2), torch.zeros(4)), "the tensors must have equal batch sizes"),
            (
                [1, 2, 3],
                "expected tensors whose dim 0 is the batch dimension, got a value of type int",
            ),
        ]:
            with pytest.raises(ValueError, match=said):
                pipe.step(batch)
    else:
        with pytest.raises(ValueError, match="the rank of the last stage must pass targets"):
            pipe.step()
    with torch.no_grad(), pytest.raises(ValueError, match="use evaluate"):
        pipe.step(torch.zeros(3, 2), torch.zeros(3))


class _Large(nn.Module):
    """Its inputs are large and its weights small: its gradients overflow before others' do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        with torch.no_grad():
            self.layer.weight.mul_(2.0**-20)

    def forward(self, x):
        return self.layer(x * 2.0**20)


def _loss_scale(group):
    """A scale changes no bit after unscaling; an overflow in one stage skips the step in both."""
    torch.manual_seed(2)
    module = _Large() if group.rank == 0 else nn.Linear(3, 3)
    pipe = Pipeline(
        [Stage(module, index=group.rank, num_stages=2)], group=group, num_microbatches=2,
        schedule="gpipe", loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    losses = pipe.step(x, y)
    plain = [p.grad.clone() for p in module.parameters()]
    start = [p.detach().clone() for p in module.parameters()]
    for scale, is_finite in ((2.0**16, True), (2.0**114, False)):
        optimizer.zero_grad()
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.data.copy_(value)
        scaler = GradScaler(scale, over=group)
        scaled = pipe.step(x, y, loss_scale=scaler.get_scale())
        if losses is not None:
            assert [one.item() for one in scaled] == [one.item() for one in losses]
        own = all(bool(p.grad.isfinite().all()) for p in module.parameters())
        assert own == (is_finite or group.rank == 1), "the overflow is the first stage's alone"
        assert scaler.unscale_(optimizer) == is_finite
        if is_finite:
            grads = [p.grad for p in module.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(start, module.parameters(), strict=True)]
        assert any(changed) == is_finite
        assert scaler.get_scale() == (scale if is_finite else scale / 2)
    with pytest.raises(ValueError, match="loss_scale must be positive and finite"):
        pipe.step(x, y, loss_scale=float("inf"))


def _cases(rank, world_size):
    torch.set_num_threads(1)
    group = dist.init()
    for case in (_several_tensors, _gradients_add_up, _evaluation, _mistakes, _loss_scale):
        case(group)
    dist.shutdown()


def test_the_executor():
    run_ranks(_cases, 2, timeout_s=60)


class _Dies(nn.Module):
    def forward(self, x):
        os._exit(7)


def _peer_dies(rank, world_size, backend):
    group = dist.init(backend=backend, timeout_s=30)
    module = nn.Linear(2, 2) if rank == 0 else _Dies()
    pipe = Pipeline(
        [Stage(module, index=rank, num_stages=2)], group=group, num_microbatches=2, loss_fn=loss_fn
    )
    with pytest.raises(CollectiveError, match="rank 1"):
        pipe.step(torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="failed in an earlier step"):
        pipe.step(torch.zeros(2, 2), torch.zeros(2))
    return True


@pytest.mark.parametrize("backend", ["shm", "gloo", "xccl"])
def test_a_peer_that_dies_is_named_and_the_pipeline_is_over(backend):
    status = next(one for one in registry.statuses() if one.name == backend)
    if not status.ready:
        pytest.skip(f"{backend}: {status}")
    assert run_ranks(_peer_dies, 2, backend, exit_codes={1: 7}, timeout_s=60)[0]


def test_a_world_of_one_runs_all_stages():
    dist.init()
    try:
        plan = schedule("interleaved_1f1b", 1, 2, 3)
        stages = [Stage(make_stage(i, 3), index=i, num_stages=3) for i in range(3)]
        pipe = Pipeline(stages, schedule=plan, loss_fn=loss_fn)
        inputs, targets = make_batch(0, 4)
        losses = pipe.step(inputs, targets)
        reference = Reference(3, tied=False)
        wanted = reference.train([(inputs, targets)], 2)[0]
        assert [one.item() for one in losses] == [one.item() for one in wanted]
        for stage, other in zip(stages, reference.stages, strict=True):
            for mine, theirs in zip(stage.module.parameters(), other.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)
    finally:
        dist.shutdown()


def test_split_balances_costs():
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    assert [len(part) for part in split(layers, 3)] == [2, 2, 2]
    assert [len(part) for part in split(layers, 3, costs=[1, 1, 1, 1, 1, 5])] == [2, 3, 1]
    assert [len(part) for part in split(layers, 2, costs=[9, 1, 1, 1, 1, 1])] == [1, 5]
    assert split(layers, 2)[1][0] is layers[3]
    uneven = nn.Sequential(nn.Embedding(100, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    assert [len(part) for part in split(uneven, 2)] == [1, 3]
    for arguments, said in [
        ((layers, 7), "6 layers cannot be split into 7"),
        ((layers, 0), "cannot be split into 0"),
        ((layers, 2, [1]), "costs must be 6 numbers"),
        (([1, 2], 1), "a dict of modules"),
    ]:
        with pytest.raises(ValueError, match=said):
            split(*arguments)


def test_a_stage_says_what_it_is_given_wrong():
    with pytest.raises(ValueError, match="stage 2 is out of range: expected 0 <= index < 2"):
        Stage(nn.Identity(), index=2, num_stages=2)
    with pytest.raises(ValueError, match=r"must be an nn.Module, got int"):
        Stage(3, index=0, num_stages=2)


def test_inputs_and_targets_of_other_sizes_are_an_error_where_one_rank_has_both():
    stages = [Stage(nn.Linear(2, 2), index=0, num_stages=1)]
    x, y = torch.zeros(8, 2), torch.zeros(4, 2)
    with pytest.raises(ValueError, match="inputs have 8 rows in dim 0, but targets have 4"):
        check_batch(stages, (x, x), y, needs_targets=True)
    check_batch(stages, (x, x), y, needs_targets=False)
    check_batch(stages, y, [y], needs_targets=True)
