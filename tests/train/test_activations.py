"""Checkpointed blocks: the bits of plain training, and less memory."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.train.activations import checkpoint_activations, costly_operations  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

_MODES = [("none", 1), ("full", 1), ("full", 2), ("selective", 1), ("selective", 3)]


def _model(dropout=0.1):
    torch.manual_seed(11)
    model = models.Gpt()
    for block in model.blocks:
        block.down = nn.Sequential(block.down, nn.Dropout(dropout))
    return model


def _gradients(model, dtype=None, index=0):
    torch.manual_seed(3)  # of the dropout
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = models.loss_of(model, index)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


class _Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves, each storage once."""

    def __init__(self):
        self._storages = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _pack(self, tensor):
        self._storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def num_bytes(self):
        return sum(one.untyped_storage().nbytes() for one in self._storages.values())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("mode", "every"), _MODES)
def test_gradients_have_the_bits_of_plain_training(mode, every, dtype):
    expected = _gradients(_model(), dtype)
    model = _model()
    names = list(model.state_dict())
    num_blocks = checkpoint_activations(model.blocks, mode, every=every)
    assert num_blocks == (0 if mode == "none" else len(range(0, models.DEPTH, every)))
    found = _gradients(model, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(model.state_dict()) == names


def _forward_counts(model):
    counts = [0] * models.DEPTH
    for index, block in enumerate(model.blocks):

        def count(*_, index=index):
            counts[index] += 1

        block.norm1.register_forward_hook(count)
    return counts


def test_every_nth_block_runs_twice_and_none_without_gradients():
    model = _model()
    checkpoint_activations(model.blocks, every=2)
    counts = _forward_counts(model)
    _gradients(model)
    assert counts == [2, 1, 2]
    with torch.no_grad():
        models.loss_of(model, 0)
    assert counts == [3, 2, 3]


def _products(run):
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.append(function)
            return function(*args, **(kwargs or {}))

    with Count():
        run()
    costly = set(costly_operations())
    return sum(one in costly for one in found), len(found)


def test_selective_makes_no_product_twice_and_full_makes_all():
    plain, selective, full = _model(0.0), _model(0.0), _model(0.0)
    checkpoint_activations(selective.blocks, "selective")
    checkpoint_activations(full.blocks)
    expected, least = _products(lambda: _gradients(plain))
    assert expected > 10
    products, operations = _products(lambda: _gradients(selective))
    assert products == expected
    assert operations > least
    assert _products(lambda: _gradients(full))[0] > expected


def test_autograd_keeps_less():
    kept = {}
    for mode in ("none", "selective", "full"):
        model = _model()
        checkpoint_activations(model.blocks, mode)
        with _Saved() as saved:
            loss = models.loss_of(model, 0)
        kept[mode] = saved.num_bytes()
        loss.backward()
    assert kept["full"] < kept["none"]
    assert kept["selective"] < kept["none"]  # what its contexts keep is measured in the docs


def test_a_copy_of_a_model_is_independent():
    model = _model()
    checkpoint_activations(model.blocks)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = _gradients(_model())
    assert all(torch.equal(a, b) for a, b in zip(_gradients(other), expected, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "some"}, "mode must be one of none, full, selective, got 'some'"),
        ({"every": 0}, "every= must be an int >= 1, got 0"),
        ({"every": True}, "every"),
        ({"keep": [torch.ops.aten.mm.default]}, "keep= requires mode 'selective'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_activations(_model().blocks, **settings)


def test_bad_blocks_are_refused_before_any_is_changed():
    model = _model()
    with pytest.raises(ValueError, match="blocks must be modules, got int"):
        checkpoint_activations([*model.blocks, 3])
    with pytest.raises(ValueError, match="a ModuleList has no forward"):
        checkpoint_activations([model.blocks])
    assert checkpoint_activations(model.blocks) == models.DEPTH
    with pytest.raises(ValueError, match="already checkpointed"):
        checkpoint_activations(model.blocks)


def _sharded(rank, size):
    """Losses and shards after two steps, for each mode, made before or after sharding."""
    from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

    models.join()
    story = []
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mode, before in (("none", True), ("full", True), ("selective", True), ("full", False)):
        model = _model()
        if before:
            checkpoint_activations(model.blocks, mode)
        for block in model.blocks:
            fully_shard(block, mp_policy=half)
        fully_shard(model, mp_policy=half)
        if not before:
            checkpoint_activations(model.blocks, mode)
        optimizer = models.make_optimizer(model)
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            loss = models.loss_of(model, step * size + rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        story.append((losses, [p.detach().clone() for p in model.parameters()]))
    dist.shutdown()
    return story


@pytest.mark.ranks
def test_sharded_blocks_in_bfloat16_train_alike_with_and_without():
    for plain, *others in run_ranks(_sharded, 2, timeout_s=120):
        for losses, shards in others:
            assert losses == plain[0]
            assert all(torch.equal(a, b) for a, b in zip(shards, plain[1], strict=True))


def _pipelined(rank, size):
    from echelon.dist.pipeline import Pipeline, Stage

    models.join()
    found = []
    for schedule, mode in (("1f1b", "none"), ("1f1b", "selective"), ("zbv", "full")):
        model = _model(0.0)
        first = nn.Sequential(model.token, *model.blocks[:1])
        middle = [nn.Sequential(model.blocks[1]), nn.Sequential(model.blocks[2])]
        last = nn.Sequential(model.norm, nn.Linear(models.WIDTH, models.VOCABULARY))
        torch.manual_seed(1)
        last[1].reset_parameters()
        checkpoint_activations(model.blocks, mode)
        layers = [first, *middle, last]
        mine = (rank, 3 - rank)
        if schedule == "1f1b":
            layers = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
            mine = (rank,)
        stages = [Stage(layers[one], index=one, num_stages=len(layers)) for one in mine]
        pipe = Pipeline(
            stages,
            schedule=schedule,
            num_microbatches=2,
            loss_fn=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        )
        pipe.step(*models.batch(0, 4))
        grads = {i: [p.grad for p in layers[i].parameters()] for i in mine}
        found.append(grads)
    dist.shutdown()
    return found


@pytest.mark.ranks
def test_stages_of_pipelines_have_the_same_gradients():
    first, last = run_ranks(_pipelined, 2, timeout_s=120)
    plain = [*first[0][0], *last[0][1]]
    selective = [*first[1][0], *last[1][1]]
    assert all(torch.equal(a, b) for a, b in zip(plain, selective, strict=True))
    halves = [*first[2][0], *last[2][1], *last[2][2], *first[2][3]]
    for one, other in zip(halves, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_blocks_have_the_same_gradients(mode):
    expected = _gradients(_model(0.0))
    model = _model(0.0)
    checkpoint_activations(model.blocks, mode)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(_gradients(model), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
