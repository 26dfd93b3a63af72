"""The chunked loss against the logits of all tokens at once."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.train.loss import chunked_cross_entropy  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

_N, _C, _V = 23, 12, 37


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small, and others use the machine
    yield
    torch.set_num_threads(before)


def _inputs(dtype=torch.float32, ignored=(3, 4)):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(_N, _C, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(_V, _C, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, _V, (_N,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, targets


def _gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, _N, None])
def test_it_equals_cross_entropy_of_all_logits(recompute, reduction, chunk_tokens):
    hidden, weight, targets = _inputs()
    settings = {"chunk_tokens": chunk_tokens, "recompute": recompute, "reduction": reduction}
    loss = chunked_cross_entropy(hidden, weight, targets, **settings)
    whole = F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)
    torch.testing.assert_close(loss, whole, atol=1e-5, rtol=1e-6)
    found = _gradients(loss * 3.0, hidden, weight)
    expected = _gradients(whole * 3.0, hidden, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5)
    assert not found[0][3:5].any()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_its_gradients_are_those_of_finite_differences(wanted):
    torch.manual_seed(5)
    hidden = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=wanted[0])
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=wanted[1])
    targets = torch.tensor([[1, 4, -100, 0]])

    def loss(hidden, weight):
        return chunked_cross_entropy(hidden, weight, targets, chunk_tokens=3, recompute=True)

    assert torch.autograd.gradcheck(loss, (hidden, weight), fast_mode=True)
    whole = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=3)
    some = [one for one in (hidden, weight) if one.requires_grad]
    again = _gradients(loss(hidden, weight), *some)
    for one, other in zip(_gradients(whole, *some), again, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [None, True])
def test_in_sixteen_bits_it_is_as_close_as_torch_to_the_exact_gradients(dtype, recompute):
    """Weights that occur in all chunks are summed in float32."""
    hidden, weight, targets = _inputs(dtype)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4, recompute=recompute)
    assert loss.dtype == torch.float32
    whole = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    exact_inputs = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*exact_inputs), targets)
    assert abs(loss.item() - exact.item()) < 1.1 * abs(whole.item() - exact.item()) + 1e-3
    found, torchs = _gradients(loss, hidden, weight), _gradients(whole, hidden, weight)
    for mine, other, right in zip(found, torchs, _gradients(exact, *exact_inputs), strict=True):
        assert mine.dtype == dtype
        assert (mine - right).norm() < 1.5 * (other - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_short_and_master_weights_get_whole_gradients(dtype):
    hidden, weight, targets = _inputs()
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4)
        logits = F.linear(hidden, weight)
        whole = F.cross_entropy(logits.float(), targets)
    assert logits.dtype == dtype
    torch.testing.assert_close(loss, whole)
    found, expected = _gradients(loss, hidden, weight), _gradients(whole, hidden, weight)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)


def test_a_scaled_float16_loss_keeps_gradients_that_float16_could_not_hold_unscaled():
    torch.manual_seed(0)
    hidden = torch.randn(64, 8).half().mul(0.01).requires_grad_()
    weight = torch.randn(5000, 8).half().mul(0.01).requires_grad_()
    targets = torch.zeros(64, dtype=torch.int64)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    (gradient,) = _gradients(loss * 4096.0, weight)
    exact = weight.detach().double().requires_grad_()
    (right,) = _gradients(F.cross_entropy(F.linear(hidden.double(), exact), targets), exact)
    difference = (gradient.double() / 4096.0 - right).norm()
    assert difference < 0.01 * right.norm()


def test_an_ignored_token_may_hold_anything():
    hidden, weight, targets = _inputs(ignored=(3,))
    spoilt = hidden.detach().clone()
    spoilt[3] = math.nan
    spoilt.requires_grad_()
    clean = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4)
    loss = chunked_cross_entropy(spoilt, weight, targets, chunk_tokens=4)
    assert torch.equal(loss, clean)
    pairs = zip(_gradients(loss, spoilt, weight), _gradients(clean, hidden, weight), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_a_token_that_counts_the_mean_is_nan_as_torchs_and_the_sum_is_zero():
    hidden, weight, targets = _inputs(ignored=range(_N))
    assert math.isnan(chunked_cross_entropy(hidden, weight, targets).item())
    total = chunked_cross_entropy(hidden, weight, targets, reduction="sum")
    assert total.item() == 0.0
    assert not any(one.any() for one in _gradients(total, hidden, weight))
    empty = chunked_cross_entropy(hidden[:0], weight, targets[:0], reduction="sum")
    assert empty.item() == 0.0


def test_without_gradients_none_are_made():
    hidden, weight, targets = _inputs()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(hidden, weight), targets))


def test_a_second_backward_is_refused_unless_it_recomputes():
    hidden, weight, targets = _inputs()
    loss = chunked_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="set recompute=True"):
        loss.backward()
    loss = chunked_cross_entropy(hidden, weight, targets, recompute=True)
    hidden.grad = None
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(_N, 5)}, ValueError, "hidden must have shape"),
        ({"weight": torch.zeros(_C)}, ValueError, "hidden must have shape"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, ValueError, "targets must be int64"),
        ({"targets": torch.zeros(_N)}, ValueError, "targets must be int64"),
        ({"hidden": torch.zeros(_N, _C).half()}, ValueError, "use autocast"),
        ({"hidden": torch.zeros(_N, _C).long()}, ValueError, "must be floating-point"),
        ({"reduction": "none"}, ValueError, "reduction"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens"),
        ({"targets": torch.full((_N,), _V)}, IndexError, f"target {_V} of token 0"),
        ({"targets": torch.full((_N,), -1)}, IndexError, "target -1"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    hidden, weight, targets = _inputs()
    with pytest.raises(error, match=message):
        chunked_cross_entropy(**({"hidden": hidden, "weight": weight, "targets": targets} | change))


def test_compiled_code_takes_it_whole():
    hidden, weight, targets = _inputs()

    def loss_of(hidden, weight):
        return chunked_cross_entropy(hidden * 2, weight, targets, chunk_tokens=9) * 3

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    found = _gradients(compiled(hidden, weight), hidden, weight)
    expected = _gradients(loss_of(hidden, weight), hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class _LossGpt(models.Gpt):
    """Gives the loss in forward, or the states that a loss outside is made of."""

    def hidden(self, ids):
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids, targets=None):
        hidden = self.hidden(ids)
        if targets is None:
            return hidden
        return chunked_cross_entropy(hidden, self.head.weight, targets, chunk_tokens=7)


def _losses(model, index, inside):
    ids, targets = models.batch(index)
    if inside:
        return model(ids, targets)
    return chunked_cross_entropy(model(ids), model.head.weight, targets, chunk_tokens=7)


def _sharded(rank, size):
    from echelon.dist.fsdp import fully_shard

    models.join()
    story = []
    for inside in (True, False):
        torch.manual_seed(11)
        model = _LossGpt()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = models.make_optimizer(model)
        for step in range(3):
            loss = _losses(model, step * size + rank, inside)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        story.append(loss.item())
    dist.shutdown()
    return story


def _alone(num_ranks):
    torch.manual_seed(11)
    model = _LossGpt()
    optimizer = models.make_optimizer(model)
    for step in range(3):
        last = []
        for rank in range(num_ranks):
            ids, targets = models.batch(step * num_ranks + rank)
            logits = F.linear(model(ids), model.head.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / num_ranks).backward()
            last.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return last


@pytest.mark.ranks
def test_a_sharded_model_with_a_tied_head_trains_as_one_process_with_all_logits():
    """The loss inside of the root's forward, or outside with the head that the root holds."""
    expected = _alone(2)
    for rank, (inside, outside) in enumerate(run_ranks(_sharded, 2, timeout_s=120)):
        assert inside == outside
        assert abs(inside - expected[rank]) < 1e-5


class _Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(_C, _C)
        self.head = nn.Linear(_C, _V, bias=False)

    def forward(self, x):
        return self.mix(x).tanh()


def _stages():
    torch.manual_seed(3)
    return nn.Embedding(_V, _C), nn.Linear(_C, _C), nn.Linear(_C, _C), _Last()


def _tokens():
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, _V, (8, 6), generator=generator)


def _pipelined(rank, size):
    from echelon.dist.pipeline import Pipeline, Stage

    models.join()
    found = []
    for schedule, mine in (("1f1b", (rank,)), ("zbv", (rank, 3 - rank))):
        layers = _stages()
        if schedule == "1f1b":
            layers = nn.Sequential(*layers[:3]), layers[3]
        last, tokens = layers[-1], _tokens()

        def loss_fn(hidden, targets, last=last):
            return chunked_cross_entropy(hidden, last.head.weight, targets, chunk_tokens=5)

        stages = [Stage(layers[one], index=one, num_stages=len(layers)) for one in mine]
        pipe = Pipeline(stages, schedule=schedule, num_microbatches=4, loss_fn=loss_fn)
        pipe.step(tokens[:, :-1], tokens[:, 1:])
        found.append([[p.grad for p in layers[one].parameters()] for one in mine])
    dist.shutdown()
    return found


@pytest.mark.ranks
def test_in_a_pipelines_last_stage_the_head_is_trained_by_the_loss():
    """By whole backwards, and by backwards in two parts."""
    layers, tokens = _stages(), _tokens()
    for part in tokens.tensor_split(4):
        x = part[:, :-1]
        for layer in layers:
            x = layer(x)
        logits = layers[-1].head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        (loss / 4).backward()
    right = [[p.grad for p in layer.parameters()] for layer in layers]
    (first, outer), (second, inner) = run_ranks(_pipelined, 2, timeout_s=120)
    expected = [[*right[0], *right[1], *right[2]], right[3], right[0], right[3], right[1], right[2]]
    found = [*first, *second, *outer, *inner]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_a_heads_slice_is_refused_rather_than_taken_for_the_whole_vocabulary():
    from echelon.dist.fsdp.parameters.slices import Slice, set_slice

    hidden, weight, targets = _inputs()
    part = nn.Parameter(weight.detach().clone())
    set_slice(part, Slice(shape=(2 * _V, _C), dim=0, index=1, count=2))
    with pytest.raises(
        ValueError, match=f"weight holds only rows {_V} to {2 * _V - 1} of the head's"
    ):
        chunked_cross_entropy(hidden, part, targets)
