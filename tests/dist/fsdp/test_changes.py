"""What a program does to parameters after `fully_shard` holds, or is an error that names them."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WIDTH = 48


def pair(**settings):
    """Return a model of which each layer is a unit, and the same whole."""
    from echelon.dist.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings), plain


def x():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def outputs_agree(model, plain):
    with torch.no_grad():
        torch.testing.assert_close(model(x()), plain(x()), atol=1e-6, rtol=1e-5)


def train(*all_models):
    for one in all_models:
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        one(x()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(parameters, factor, *, assign=False):
    with torch.no_grad():
        for parameter in parameters:
            if assign:
                parameter.data = parameter.data * factor
            else:
                parameter.mul_(factor)


def _written(rank, size):
    from echelon.dist.fsdp import MixedPrecisionPolicy, full_state_dict, reshard, unshard

    models.join()
    model, plain = pair()
    for _ in range(2):  # values assigned to shards are the shards', and stay trained
        for one in (model, plain):
            scaled(one.parameters(), 0.9, assign=True)
        train(model, plain)
        outputs_agree(model, plain)
    unshard(model)  # values written into whole parameters reach the shards
    for one in (model, plain):
        scaled(one.parameters(), 0.9)
    scaled(model[0].parameters(), 1.1, assign=True)
    scaled(plain[0].parameters(), 1.1, assign=True)
    reshard(model)
    train(model, plain)
    outputs_agree(model, plain)
    model, plain = pair(reshard_after_forward=1)  # a part that was kept is not the shards' any more
    kept = model(x())
    for one in (model, plain):
        scaled(one.parameters(), 0.9)
    outputs_agree(model, plain)
    del kept
    # What was not written keeps the precision of the shards.
    model, plain = pair(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    unshard(model)
    with torch.no_grad():
        model[1].weight[0].fill_(2.0)
        plain[1].weight[0].fill_(2.0)
    reshard(model)
    state = full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    dist.shutdown()


def test_values_that_a_program_writes_or_assigns_are_those_that_it_trains():
    run_ranks(_written, 2)


def _frozen(rank, size):
    from echelon.dist.fsdp import reshard, unshard

    models.join()
    model, plain = pair()
    unshard(model)
    model[1].requires_grad_(False)
    reshard(model)
    plain[1].requires_grad_(False)
    assert not any(p.requires_grad for p in model[1].parameters())
    train(model, plain)
    outputs_agree(model, plain)
    dist.shutdown()


def test_a_layer_frozen_while_it_is_whole_stays_frozen():
    run_ranks(_frozen, 2)


def _late(rank, size):
    models.join()
    model, plain = pair()
    for one in (model, plain):
        parameters = list(one.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        changes = [
            lambda: scaled(parameters, 0.5),  # noqa: B023
            lambda: one.load_state_dict(one.state_dict()),  # noqa: B023
            optimizer.step,
        ]
        for change in changes:
            loss = one(x()).square().mean()
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            change()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            one.zero_grad()
    outputs_agree(model, plain)
    train(model, plain)
    outputs_agree(model, plain)
    dist.shutdown()


def test_a_backward_through_weights_that_changed_since_their_forward_raises_as_in_torch():
    run_ranks(_late, 2)


def _replaced(rank, size):
    models.join()
    model, plain = pair()
    values = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    with pytest.raises(ValueError, match="parameter 'weight' of a Linear was replaced"):
        torch.func.functional_call(model, values, (x(),))
    outputs_agree(model, plain)
    was = model[1].weight
    model[1].weight = nn.Parameter(torch.eye(WIDTH))
    with pytest.raises(ValueError, match="parameter 'weight' of a Linear was replaced"):
        model(x())
    model[1].weight = was
    outputs_agree(model, plain)
    model.double()
    with pytest.raises(ValueError, match=r"was torch.float32 .* changed to torch.float64"):
        model(x().double())
    model.float()
    outputs_agree(model, plain)
    train(model, plain)
    outputs_agree(model, plain)
    dist.shutdown()


def test_a_parameter_that_is_replaced_or_converted_is_an_error():
    """And putting it back mends it."""
    run_ranks(_replaced, 2)
