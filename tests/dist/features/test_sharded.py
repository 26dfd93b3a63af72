"""What PyTorch 2 offers beside eager mode, under fully_shard and with the recorder on."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

import echelon.dist as dist  # noqa: E402
from echelon.dist.fsdp import (  # noqa: E402
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    reshard,
)
from tests.dist.features import models  # noqa: E402

_STEPS = 2
_UNBOUNDED = 1e9  # as a norm to clip to: everything is computed and nothing changes


def _join(folder: str | None = None) -> None:
    """Join the world; record into a folder, as under the launcher."""
    torch.set_num_threads(1)
    if folder is not None:
        os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{os.environ['RANK']}"
        importlib.import_module("echelon.recorder.current")._opened = False  # the server's
    dist.init(reduction="rank_ordered", timeout_s=600.0)  # a rank waits while another compiles


def _shard(model, **options):
    for block in model.blocks.values():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _batches(size: int, lengths=(models.CONTEXT,) * _STEPS):
    return [
        [models.batch(step * size + rank, length=length) for rank in range(size)]
        for step, length in enumerate(lengths)
    ]


def _train(model, call, batches, rank, optimizer_by=None):
    """Train a sharded model by `call`, which is the model or a compiled form of it."""
    optimizer = models.sgd(model)
    take_step = optimizer.step
    if optimizer_by is not None:
        take_step = torch.compile(take_step, backend=optimizer_by)
    for each in batches:
        ids, targets = each[rank]
        models.loss_fn(call(ids), targets).backward()
        take_step()
        optimizer.zero_grad()
    return full_state_dict(model)


def _train_by_a_compiled_function(model, backend, batches, rank):
    """Everything of a step is in one compiled function."""
    optimizer = models.sgd(model)

    @torch.compile(backend=backend)
    def train(ids, targets):
        models.loss_fn(model(ids), targets).backward()
        clip_grad_norm_(model, _UNBOUNDED)

    for each in batches:
        train(*each[rank])
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def _ways(rank, size, backend, folder):
    _join(folder)
    batches = _batches(size)
    expected = models.train_alone(models.Model(), batches, size)
    found = {}

    def note(way, state):
        found[way] = models.distance(state, expected)
        torch._dynamo.reset()

    model = _shard(models.Model())
    note("the whole", _train(model, torch.compile(model, backend=backend), batches, rank))
    model = _shard(models.Model())
    model.compile(backend=backend)
    note("the whole in place", _train(model, model, batches, rank))
    model = models.Model()
    for block in model.blocks.values():
        block.compile(backend=backend)
    note("each block", _train(_shard(model), model, batches, rank))
    model = _shard(models.Model(), reshard_after_forward=False)
    call = torch.compile(model, backend=backend)
    note("the whole, kept gathered", _train(model, call, batches, rank))
    model = _shard(models.Model())
    note("a step", _train_by_a_compiled_function(model, backend, batches, rank))
    model = _shard(models.Model())
    note("the optimizer", _train(model, model, batches, rank, optimizer_by=backend))
    dist.shutdown()
    return found


_WAYS = ["the whole", "the whole in place", "each block", "the whole, kept gathered", "a step"]
_WAYS += ["the optimizer"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_models_train_bit_for_bit_as_eager_ones(tmp_path, backend):
    for found in run_ranks(_ways, 2, backend, str(tmp_path), timeout_s=240):
        assert found == dict.fromkeys(_WAYS, 0.0)
    for rank in range(2):
        ring = read_ring(Path(tmp_path, f"rank_{rank}", "ring"))
        kinds = [ring.strings[row["operation"]] for row in ring.operations]
        assert {"all_gather", "reduce_scatter"} <= set(kinds)
        sites = {ring.strings[row["site"]].rpartition(":")[0] for row in ring.operations}
        assert {Path(site).name for site in sites} == {"test_sharded.py", "models.py"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_models_compiled_by_inductor_train_as_eager_ones(tmp_path):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    for found in run_ranks(_ways, 2, "inductor", str(tmp_path), timeout_s=600):
        assert list(found) == _WAYS
        assert max(found.values()) < 1e-5


def _lengths(rank, size):
    from torch._dynamo.utils import counters

    _join()
    batches = _batches(size, (16, 9, 12, 7, 16, 10))
    expected = models.train_alone(models.Model(), batches, size)
    found = []
    for dynamic in (None, True, False):
        torch._dynamo.reset()
        counters.clear()
        model = models.Model()
        for block in model.blocks.values():
            block.compile(backend="eager", dynamic=dynamic)
        distance = models.distance(_train(_shard(model), model, batches, rank), expected)
        found.append((distance, counters["stats"]["unique_graphs"]))
    dist.shutdown()
    return found


def test_batches_of_many_lengths_compile_a_block_twice_at_most():
    for found in run_ranks(_lengths, 2, timeout_s=240):
        assert found == [(0.0, 2), (0.0, 1), (0.0, 5)], "automatic, always, never dynamic"


def _kernels(rank, size):
    _join()
    batches = _batches(size)
    found, errors = {}, {}
    for name in ("MATH", "FLASH_ATTENTION"):
        kind = f"causal {name}"
        expected = models.train_alone(models.Model(kind), batches, size)
        model = _shard(models.Model(kind))
        found[name] = models.distance(_train(model, model, batches, rank), expected)
        torch._dynamo.reset()
        model = _shard(models.Model(kind))
        call = torch.compile(model, backend="eager")
        found[f"{name}, compiled"] = models.distance(_train(model, call, batches, rank), expected)
    for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        errors[name] = _refused(f"causal {name}", batches, rank, size)
    for mask in models.MASKS:
        errors[mask] = _refused(f"flex {mask}", batches, rank, size)
    dist.shutdown()
    return found, errors


def _refused(kind, batches, rank, size):
    """Return torch's error for an attention that it cannot train with here; train on by another."""
    model = _shard(models.Model(kind))
    ids, targets = batches[0][rank]
    try:
        models.loss_fn(model(ids), targets).backward()
    except RuntimeError as err:
        reshard(model)  # the forward ended halfway
        for block in model.blocks.values():
            block.attention.kind = "causal"
        expected = models.train_alone(models.Model("causal"), batches, size)
        assert models.distance(_train(model, model, batches, rank), expected) == 0.0
        return str(err)
    return "none"


def test_sdpa_and_flex_attention_train_or_fail_with_torchs_error_and_leave_the_model_usable():
    for found, errors in run_ranks(_kernels, 2, timeout_s=240):
        assert set(found.values()) == {0.0}, found
        for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            assert "No viable backend" in errors[name] or "No available kernel" in errors[name]
        for mask in models.MASKS:
            assert "does not support backward on CPU" in errors[mask]


def _evaluated(rank, size):
    _join()
    ids, _ = models.batch(rank)
    found = []
    for mask in models.MASKS:
        expected = models.Model(mask)(ids)
        for backend in (None, "eager"):
            torch._dynamo.reset()
            model = _shard(models.Model(f"flex {mask}"))
            call = model if backend is None else torch.compile(model, backend=backend)
            with torch.no_grad():
                found.append(float((call(ids) - expected).abs().max()))
    dist.shutdown()
    return found


@pytest.mark.slow  # 15 s: FlexAttention without a compiler
def test_flex_attention_evaluates_document_and_window_masks_as_sdpa_does():
    for found in run_ranks(_evaluated, 2, timeout_s=240):
        assert max(found) < 1e-5


def _halves(rank, size, compiler):
    _join()
    batches = _batches(size)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        states = []
        for backend in (None, compiler):
            torch._dynamo.reset()
            model = _shard(models.Model(), mp_policy=policy)
            call = model if backend is None else torch.compile(model, backend=backend)
            states.append(_train(model, call, batches, rank))
        found[str(dtype)] = models.distance(*states)
        alone = models.train_alone(models.Model(), batches, size)
        assert 0 < models.distance(states[0], alone) < 1e-2
    dist.shutdown()
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_models_in_16_bits_train_bit_for_bit_as_eager_ones(backend):
    for found in run_ranks(_halves, 2, backend, timeout_s=240):
        assert found == {"torch.bfloat16": 0.0, "torch.float16": 0.0}


def _compiled_backward(rank, size):
    import torch._dynamo.compiled_autograd as compiled_autograd

    _join()
    batches = _batches(size)
    expected = models.train_alone(models.Model(), batches, size)
    model = _shard(models.Model())
    ids, targets = batches[0][rank]
    refused = []
    with compiled_autograd._enable(torch.compile(backend="eager")):
        plain = torch.nn.Linear(2, 2)
        plain(torch.ones(1, 2)).sum().backward()
        assert plain.weight.grad.eq(1).all(), "what is not sharded is left to it"
        for reduction in (lambda x: x, lambda x: [x], lambda x: (x, plain(torch.ones(1, 2)).sum())):
            with pytest.raises(ValueError, match=r"Compiled Autograd cannot .* is sharded") as err:
                torch.autograd.backward(reduction(models.loss_fn(model(ids), targets)))
            refused.append(str(err.value))
    reshard(model)  # no backward did
    found = models.distance(_train(model, model, batches, rank), expected)
    dist.shutdown()
    return found


def test_compiled_autograd_is_refused_by_name_and_the_model_trains_on():
    assert run_ranks(_compiled_backward, 2, timeout_s=240) == [0.0, 0.0]
