"""A backward in two parts, against a whole one: bit by bit, and that something is put off."""

import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from echelon.dist.pipeline.execute.stage import Stage  # noqa: E402


class Shared(nn.Module):
    """One layer used three times, and a parameter that is made of two others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.left = nn.Parameter(torch.randn(8, 2))
        self.right = nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x @ (self.left @ self.right)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return Doubled.apply(x, self.weight)


class Several(nn.Module):
    """Two inputs, one of them unused for gradients; two outputs, one of them of integers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, count):
        y = self.norm(self.layer(x) * count.unsqueeze(1))
        return y, y.mean(1), count + 1


def _attention():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


MODULES = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
    "shared": Shared,
    "custom": lambda: nn.Sequential(nn.Linear(8, 8), Custom(), nn.Linear(8, 8)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.ReLU(), nn.Conv1d(4, 6, 3)),
    "attention": _attention,
    "no parameters": lambda: nn.Sequential(nn.GELU(), nn.Softmax(-1)),
}


def _run(module, inputs, *, is_split):
    stage = Stage(module, index=1, num_stages=3)
    for one in module.parameters():
        one.grad = None
    leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
    outputs = module(*leaves)
    stage.keep(0, leaves, outputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(9)
    gradients = [torch.randn_like(one) for one in outputs if one.requires_grad]
    early = None
    if is_split:
        own = stage.input_half(0, gradients)
        early = [one.grad is not None for one in module.parameters()]
        stage.weight_half(0)
    else:
        own = stage.backward(0, gradients)
    assert not stage._saved
    return own, [one.grad for one in module.parameters()], early


@pytest.mark.parametrize("name", MODULES)
def test_two_halves_are_a_whole(name):
    torch.manual_seed(3)
    module = MODULES[name]()
    inputs = [torch.randn(4, 6, 8)]
    whole, weights, _ = _run(module, inputs, is_split=False)
    halves, split_weights, early = _run(module, inputs, is_split=True)
    for one, other in zip([*whole, *weights], [*halves, *split_weights], strict=True):
        assert torch.equal(one, other)
    if name in ("linear", "convolution", "attention"):
        assert not any(early), "every weight waits: an input's gradient needs none of them"


def test_several_inputs_and_outputs():
    module = Several()
    inputs = [torch.randn(4, 8), torch.tensor([1, 2, 3, 4])]
    whole, weights, _ = _run(module, inputs, is_split=False)
    halves, split_weights, early = _run(module, inputs, is_split=True)
    assert len(whole) == len(halves) == 1
    for one, other in zip([*whole, *weights], [*halves, *split_weights], strict=True):
        assert torch.equal(one, other)
    assert not any(early)


def test_a_first_stage_puts_off_what_it_can():
    """Nothing goes on to an input: its embedding is the end, the layers above it wait."""
    module = nn.Sequential(nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    inputs = [torch.tensor([[1, 2, 0], [4, 4, 1]])]
    whole, weights, _ = _run(module, inputs, is_split=False)
    _, split_weights, early = _run(module, inputs, is_split=True)
    assert whole == []
    assert all(torch.equal(a, b) for a, b in zip(weights, split_weights, strict=True))
    assert early == [True, True, True, False, False, False, False]


def test_frozen_parameters_stay_without_gradients():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    _, weights, _ = _run(module, [torch.randn(4, 8)], is_split=True)
    assert [one is None for one in weights] == [True, True, False, False]


def test_an_input_that_was_not_used_has_zeros():
    class First(nn.Module):
        def forward(self, x, y):
            return x * 2

    own, _, _ = _run(First(), [torch.ones(3), torch.ones(3)], is_split=True)
    torch.manual_seed(9)  # as in _run: the gradient of the output
    assert torch.equal(own[0], 2 * torch.randn(3))
    assert torch.equal(own[1], torch.zeros(3))


class Checkpointed(nn.Module):
    """A block of six parameters whose activations are recomputed in the backward."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.num_forwards = 0

    def _run(self, x):
        self.num_forwards += 1
        return x + self.block(x)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self._run, x, use_reentrant=False)


def test_checkpointed_activations_are_recomputed_once_in_each_half():
    """Not once for each layer of the block; and the cost is told, once for a stage."""
    torch.manual_seed(3)
    module = Checkpointed()
    inputs = [torch.randn(4, 8)]
    whole, weights, _ = _run(module, inputs, is_split=False)
    assert module.num_forwards == 2
    module.num_forwards = 0
    with pytest.warns(RuntimeWarning, match=r"Stage\(1 of 3.* recomputes .* twice") as told:
        halves, split_weights, early = _run(module, inputs, is_split=True)
    assert len(told) == 1
    assert module.num_forwards == 3
    assert not any(early)
    for one, other in zip([*whole, *weights], [*halves, *split_weights], strict=True):
        assert torch.equal(one, other)


def test_a_stage_without_checkpointing_is_told_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [torch.randn(4, 8)], is_split=True)
