"""What a program shares with a pipeline beyond its stages: one weight twice, computed inputs."""

import copy

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist.pipeline import Pipeline, Stage, schedule, split
from echelon.dist.pipeline.execute.agreement import check_shared
from echelon.errors import CollectiveError
from tests.dist.pipeline.models import loss_fn
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.t()


def tied_model():
    torch.manual_seed(3)
    token = nn.Embedding(7, 8)
    return nn.Sequential(token, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Head(token.weight))


def _gradients(model, inputs, targets):
    """What one process computes, micro-batch by micro-batch."""
    model = copy.deepcopy(model)
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (loss_fn(model(x), y) / 4).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _one_weight_in_two_stages(group, name, num_stages, ties):
    """In a V one rank has the first stage and the last: one object, which autograd sums up."""
    model = tied_model()
    ids = torch.arange(24).view(8, 3) % 7
    wanted = _gradients(model, ids, ids)
    plan = schedule(name, 2, 4)
    parts = split(model, num_stages, costs=[1] * 5)
    stages = [Stage(parts[i], index=i, num_stages=num_stages) for i in plan.stages_of(group.rank)]
    pipe = Pipeline(stages, group=group, schedule=plan, loss_fn=loss_fn, ties=ties)
    for number in (1, 2):  # the second step adds to the first
        pipe.step(ids, ids)
        for stage in stages:
            for key, parameter in stage.module.named_parameters():
                expected = number * wanted["0.weight" if key == "4.weight" else key]
                assert torch.allclose(parameter.grad, expected, atol=1e-6), (name, key, number)


def _computed_inputs(group, name):
    """A prompt that the program trains itself: its backward runs once, with all micro-batches."""
    torch.manual_seed(4)
    prompt, model = nn.Linear(8, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    whole = copy.deepcopy(nn.Sequential(prompt, nn.Tanh(), model))
    mean_square = nn.functional.mse_loss
    mean_square(whole(x), y).backward()
    plan = schedule(name, 2, 4)
    parts = split(model, plan.num_stages)
    stages = [
        Stage(parts[i], index=i, num_stages=plan.num_stages) for i in plan.stages_of(group.rank)
    ]
    pipe = Pipeline(stages, group=group, schedule=plan, loss_fn=mean_square)
    pipe.step((torch.tanh(prompt(x)),), y)
    if pipe.has_first:
        assert torch.allclose(prompt.weight.grad, whole[0].weight.grad, atol=1e-6), name
        leaf = torch.tanh(whole[0](x)).detach().requires_grad_()
        pipe.step(leaf, y)
        assert leaf.grad is not None
    else:
        pipe.step(None, y)


class Filter(nn.Module):
    """Hands on as many rows as it likes, none among them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)[x[:, 0] > 0]


class Total(Filter):
    def forward(self, x):
        return self.layer(x).square().sum()


def _no_rows(group, name):
    """Micro-batches of which nothing is left, in the first step and later, beside full ones."""
    torch.manual_seed(5)
    plan = schedule(name, 2, 4)
    last = plan.num_stages - 1
    model = [Filter(), *[nn.Linear(4, 4) for _ in range(last - 1)], Total()]
    whole = copy.deepcopy(nn.Sequential(*model))
    stages = [Stage(model[i], index=i, num_stages=last + 1) for i in plan.stages_of(group.rank)]
    pipe = Pipeline(stages, group=group, schedule=plan)
    for empty in ((0,), (1, 2), (), (0, 1, 2, 3)):
        x = torch.rand(8, 4) + 0.1
        for number in empty:
            x[2 * number : 2 * number + 2] = -1
        group.broadcast(x, 0)
        pipe.step(x)
        for part in x.tensor_split(4):
            (whole(part) / 4).backward()
    for stage in stages:
        for mine, theirs in zip(
            stage.module.parameters(), whole[stage.index].parameters(), strict=True
        ):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5), (name, stage.index)


class Twice(nn.Module):
    """Returns one tensor twice; the next stage uses both."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y, y


class Product(Twice):
    def forward(self, x, y):
        return (self.layer(x) * y).sum()


def _one_tensor_twice(group):
    torch.manual_seed(6)
    model, x = [Twice(), Product()], torch.rand(8, 4)
    whole = copy.deepcopy(model)
    own = model[group.rank]
    pipe = Pipeline([Stage(own, index=group.rank, num_stages=2)], group=group, num_microbatches=4)
    pipe.step(x)
    (sum(whole[1](*whole[0](part)) for part in x.tensor_split(4)) / 4).backward()
    for mine, theirs in zip(own.parameters(), whole[group.rank].parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5)


def _stages_on_two_kinds_of_devices(group):
    """Their messages would never meet. A stage without tensors of its own counts as on the CPU."""
    module = nn.Linear(4, 4, device="meta") if group.rank == 0 else nn.Tanh()
    with pytest.raises(
        ValueError, match=r"are on (meta|cpu), but this rank's are on (meta|cpu)\. .* buffer"
    ):
        Pipeline(
            [Stage(module, index=group.rank, num_stages=2)], group=group, num_microbatches=2,
            loss_fn=loss_fn,
        )  # fmt: skip


def _a_loss_without_a_graph(group):
    """Plain torch raises there, too; here the step would have trained nothing."""
    module = nn.Linear(4, 4)
    pipe = Pipeline(
        [Stage(module, index=group.rank, num_stages=2)], group=group, num_microbatches=2,
        loss_fn=lambda y, t: nn.functional.mse_loss(y.detach(), t),
    )  # fmt: skip
    x = torch.ones(4, 4)
    kind, said = (
        (ValueError, "the loss of micro-batch 0 does not require gradients")
        if pipe.has_last
        else (CollectiveError, "rank 1")
    )
    with pytest.raises(kind, match=said):
        pipe.step(x, x)


def _cases(rank, world_size):
    torch.set_num_threads(1)
    group = dist.init(timeout_s=60)
    _one_weight_in_two_stages(group, "zbv", 4, [])
    _one_weight_in_two_stages(group, "zbv", 4, [["0:0.weight", "3:4.weight"]])
    _one_weight_in_two_stages(group, "1f1b", 2, [["0:0.weight", "1:4.weight"]])
    for name in ("1f1b", "zbv"):
        _computed_inputs(group, name)
        _no_rows(group, name)
    _one_tensor_twice(group)
    _stages_on_two_kinds_of_devices(group)
    _a_loss_without_a_graph(group)


def test_gradients_reach_what_stages_and_the_program_share():
    run_ranks(_cases, 2, timeout_s=60)


def test_a_weight_that_split_divides_among_ranks_must_be_tied():
    """Its copies would otherwise drift apart without an error."""
    parts = split(tied_model(), 4, costs=[1] * 5)
    stages = [Stage(part, index=i, num_stages=4) for i, part in enumerate(parts)]
    on_two, in_a_v = schedule("interleaved_1f1b", 2, 4), schedule("zbv", 2, 4)
    with pytest.raises(ValueError, match=r"pass ties=\[\['0:0.weight', '3:4.weight'\]\]"):
        check_shared([stages[0], stages[2]], on_two, [])
    with pytest.raises(ValueError, match=r"\(0:0.weight, 3:4.weight\) on ranks \[0, 1\]"):
        check_shared([stages[1], stages[3]], on_two, [["0:0.weight", "1:1.weight"]])
    check_shared([stages[1], stages[3]], on_two, [["0:0.weight", "3:4.weight"]])
    check_shared([stages[0], stages[3]], in_a_v, [])
