"""Programs at the edges of units train as the plain model does, or fail with an error."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
STEPS = 3


def assert_same_training(make, units, loss, **settings):
    """Train a plain and a sharded copy on equal data on all ranks; their states must agree."""
    from echelon.dist.fsdp import full_state_dict, fully_shard

    torch.manual_seed(0)
    plain = make()
    sharded = copy.deepcopy(plain)
    for unit in units(sharded):
        fully_shard(unit, **settings)
    fully_shard(sharded, **settings)
    for model in (plain, sharded):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    expected, state = plain.state_dict(), full_state_dict(sharded)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5, msg=name)
    start = make_again(make).state_dict()
    assert any(not torch.equal(start[name], value) for name, value in expected.items())


def make_again(make):
    torch.manual_seed(0)
    return make()


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# ---- frozen parameters above and below trained units ----


class Adapted(nn.Module):
    """A trained head and trained inner blocks between frozen layers, all in the root but blocks."""

    def __init__(self, width, num_blocks):
        super().__init__()
        self.token = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        x = self.token(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.frozen(x))


def _adapted(rank, size):
    models.join()
    for width, num_blocks in ((64, 1), (64, 3), (1024, 1)):
        x = some(4, width)
        assert_same_training(
            lambda: Adapted(width, num_blocks),  # noqa: B023
            lambda model: list(model.blocks),
            lambda model, step: model(x + step).square().mean(),  # noqa: B023
        )
    dist.shutdown()


def test_a_frozen_layer_above_a_trained_unit_stays_until_it_was_used():
    """The root's last gradient comes before the frozen layer's turn in backward."""
    run_ranks(_adapted, 2)


# ---- ties with a unit of their own ----


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        return self.head(self.middle(self.token(tokens)))


def _tied(rank, size):
    models.join()
    tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))
    for units in (lambda m: [m.token], lambda m: [m.token, m.middle], lambda m: [m.middle]):
        assert_same_training(
            Tied, units, lambda model, step: model(tokens).square().mean() * (step + 1)
        )
        assert_same_training(
            Tied,
            units,
            lambda model, step: model(tokens).square().mean() * (step + 1),
            reshard_after_forward=False,
        )
    dist.shutdown()


def test_an_embedding_in_a_unit_of_its_own_may_be_tied_to_a_head_in_the_root():
    run_ranks(_tied, 2)


# ---- units of different sizes ----


def _sizes(rank, size):
    models.join()
    for widths in ((400, 1000, 20, 2500, 40), (8, 900, 16, 700, 900, 8)):
        x = some(4, widths[0])
        assert_same_training(
            lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))),  # noqa: B023
            list,
            lambda model, step: model(x + step).square().mean(),  # noqa: B023
        )
    dist.shutdown()


def test_units_of_different_sizes_train_in_any_order():
    run_ranks(_sizes, 2)


def test_a_pool_lends_buffers_of_any_sizes():
    from echelon.dist.fsdp.memory.storage import Pool

    pool, cpu = Pool(), torch.device("cpu")
    lent = [pool.acquire(numel, torch.float32, cpu) for numel in (100, 50, 75)]
    for buffer in lent:
        pool.give_back(buffer)
    big = pool.acquire(200, torch.float32, cpu)
    assert big.numel() == 200
    assert pool.acquire(60, torch.float32, cpu).numel() == 60
    assert pool.num_bytes >= 4 * 100  # the smallest was replaced, the largest is still there


# ---- released memory ----


class Perceptual(nn.Module):
    """A frozen network of which a loss takes an intermediate result."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.seen = None
        self.requires_grad_(False)

    def forward(self, x):
        self.seen = self.first(x)
        return self.second(self.seen)


def _perceptual(rank, size):
    from echelon.dist.fsdp import fully_shard, unshard

    models.join()
    torch.manual_seed(0)
    trained = nn.Linear(64, 64)
    network = fully_shard(Perceptual())
    network(trained(some(4, 64)))
    with pytest.raises(RuntimeError, match="at version 10000000"):
        network.seen.square().sum().backward()
    expected = copy.deepcopy(trained)
    torch.manual_seed(0)
    nn.Linear(64, 64)
    plain = Perceptual()
    trained.zero_grad()
    unshard(network)
    for model, below in ((network, trained), (plain, expected)):
        model(below(some(4, 64)))
        model.seen.square().sum().backward()
    torch.testing.assert_close(trained.weight.grad, expected.weight.grad)
    dist.shutdown()


def test_an_intermediate_of_a_frozen_unit_is_an_error_and_not_a_gradient_of_zeros():
    """Unless the unit is held: then the gradient is right."""
    run_ranks(_perceptual, 2)


# ---- sums of micro-batches ----


def _accumulated(rank, size):
    from echelon.dist.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        gradient_sync,
        reduce_gradients,
        reshard,
        unshard,
    )

    models.join()
    num_batches = 64
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    batches = [some(4, 32) + batch / 50 for batch in range(num_batches)]
    exact = sum(_gradient(model, x) for x in batches)
    fully_shard(model, mp_policy=precision)

    def error():
        whole = torch.empty(size * model.weight.grad.numel())
        dist.world().all_gather(whole, model.weight.grad.reshape(-1).contiguous())
        return float((whole - exact.reshape(-1)).norm() / exact.norm())

    with gradient_sync(model, enabled=False):
        for x in batches[:-1]:
            model(x).float().square().sum().backward()
    model(batches[-1]).float().square().sum().backward()
    accumulated = error()
    model.weight.grad = None
    unshard(model)
    for x in batches:
        model(x).float().square().sum().backward()
    reduce_gradients(model)
    reshard(model)
    dist.shutdown()
    return accumulated, error_of_one_bf16_rounding(exact)


def _gradient(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return model.weight.grad.clone()


def error_of_one_bf16_rounding(exact):
    return float((exact.bfloat16().float() - exact).norm() / exact.norm())


def test_gradients_of_micro_batches_are_added_in_the_dtype_of_the_reduction():
    for accumulated, once in run_ranks(_accumulated, 2):
        assert accumulated < 2 * once


# ---- the meta device ----


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0))
        self.scale = nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        nn.init.ones_(self.scale)


def _meta(rank, size):
    from echelon.dist.fsdp import fully_shard

    models.join()
    with torch.device("meta"):
        model = Tied()
    model.token.weight.note = "kept"
    parameter = model.token.weight
    fully_shard(model.token)
    fully_shard(model)
    assert model.head.weight is model.token.weight is parameter
    assert parameter.note == "kept"
    with torch.device("meta"):
        model = Rotating()
    with pytest.raises(ValueError, match="buffer 'frequencies' is on the meta device"):
        fully_shard(model)

    def init(module):
        if isinstance(module, Rotating):
            module.frequencies.copy_(torch.arange(4.0))

    with torch.device("meta"):
        model = Rotating()
    fully_shard(model, init=init)
    assert model.frequencies.tolist() == [0, 1, 2, 3]
    dist.shutdown()


def test_the_meta_device_keeps_ties_across_units_and_makes_up_no_buffers():
    run_ranks(_meta, 2)


# ---- calls at the wrong time or place ----


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 4)

    def encode(self, tokens):
        return self.token(tokens)

    def forward(self, tokens):
        return self.head(self.encode(tokens))


def _outside(rank, size):
    from echelon.dist.fsdp import fully_shard, register_forward_method

    models.join()
    torch.manual_seed(0)
    plain = Encoder()
    model = fully_shard(copy.deepcopy(plain))
    tokens = torch.tensor([1, 2, 3])
    with pytest.raises(RuntimeError, match="Embedding inside unit 'Encoder' was called outside"):
        model.encode(tokens)
    register_forward_method(model, "encode")
    torch.testing.assert_close(model.encode(tokens), plain.encode(tokens))
    model(tokens).sum().backward()
    with pytest.raises(ValueError, match="no method 'decode'"):
        register_forward_method(model, "decode")
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(inner)
    with pytest.raises(ValueError, match="shard the blocks first"):
        fully_shard(inner[0])
    dist.shutdown()


def test_what_a_shard_cannot_do_is_an_error_that_names_the_way():
    run_ranks(_outside, 2)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.b(torch.relu(self.a(self.a(x)))))


def _twice(rank, size):
    models.join()
    x = some(4, 8)
    assert_same_training(
        Twice, lambda model: [[model.a, model.b]], lambda model, step: model(x + step).sum()
    )
    dist.shutdown()


def test_a_module_of_a_unit_of_several_may_be_called_twice():
    run_ranks(_twice, 2)


# ---- outputs that are inputs or parameters, graphs that are used twice ----


class Dropped(nn.Module):
    """A layer that some steps leave out, and that hands its weight to the loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.is_dropped = False

    def forward(self, x):
        return (x if self.is_dropped else torch.tanh(self.linear(x))), self.linear.weight


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(4))

    def forward(self, x, step):
        penalty = 0.0
        for index, layer in enumerate(self.layers):
            layer.is_dropped = (index + step) % 3 == 0
            x, weight = layer(x)
            penalty = penalty + (weight @ weight).square().sum()
        return x, penalty


def _penalized(model, step):
    y, penalty = model(some(4, 16) + step, step)
    return y.square().mean() + 0.1 * penalty


def _gradient_penalty(model, step):
    x = (some(4, 16) + step).requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean()


class Skipping(nn.Module):
    """A layer with three inputs: the gradient of the second is there before the layer's own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, skip, unused):
        return torch.tanh(self.linear(x)) + skip


class Connected(nn.Module):
    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Skipping() for _ in range(4))

    def forward(self, x):
        condition = self.condition(x)
        for layer in self.layers:
            x = layer(x, condition, x)
        return x


def _in_place(num):
    """Units that begin by changing their input, as residual networks before activation do."""
    layers = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16)) for _ in range(num))
    return nn.Sequential(nn.Linear(16, 16), *layers)


def _reduced_before_the_end(model):
    """Count the units that are done before the backward is."""
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.fsdp.step.driver import Driver

    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    done, ends = [], []
    noted, ended = Driver.inputs_have_gradients, Driver._end_backward

    def note(self, unit, call):
        done.append(unit) if not ends else None
        noted(self, unit, call)

    def end(self):
        ends.append(self)
        ended(self)

    Driver.inputs_have_gradients, Driver._end_backward = note, end
    try:
        _gradient_of_sum(model, 0).backward()
    finally:
        Driver.inputs_have_gradients, Driver._end_backward = noted, ended
    return len(set(map(id, done)))


def _gradient_of_sum(model, step):
    return model(some(4, 16) + step).square().mean()


def _layers(num):
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(num)))


def _passed_on(rank, size):
    models.join()
    assert_same_training(Penalized, lambda model: list(model.layers), _penalized)
    assert_same_training(lambda: _layers(4), list, _gradient_penalty)
    assert_same_training(lambda: _in_place(4), list, _gradient_of_sum)
    assert _reduced_before_the_end(_in_place(4)) == 4
    assert_same_training(Connected, lambda model: list(model.layers), _gradient_of_sum)
    dist.shutdown()


def test_units_may_return_inputs_or_weights_have_skips_and_gradient_penalties():
    run_ranks(_passed_on, 2)


# ---- activation checkpointing ----


class Checkpointed(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _reentrant(rank, size):
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.fsdp.step.reducer import Reducer

    models.join()
    blocks = Checkpointed()
    for block in blocks:
        fully_shard(block)
    fully_shard(blocks)
    started = []
    start = Reducer.start

    def watched(self, unit):
        whole = sum(member.leaf.grad is not None for one in blocks for member in members(one))
        started.append((unit.name, whole))
        start(self, unit)

    Reducer.start = watched
    blocks(some(4, 64).requires_grad_()).sum().backward()
    dist.shutdown()
    return started


def members(block):
    from echelon.dist.fsdp.parameters.unit import unit_of

    return list(unit_of(block).members)


def test_reentrant_checkpoints_reduce_each_block_when_its_gradients_are_there():
    for started in run_ranks(_reentrant, 2):
        assert [name for name, _ in started] == ["3", "2", "1", "0"]
        assert max(whole for _, whole in started) <= 2
