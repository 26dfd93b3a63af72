"""What PyTorch 2 offers beside eager mode, in the stages of a pipeline and with the recorder on."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from echelon.errors import CollectiveError
from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

import echelon.dist as dist  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage  # noqa: E402
from tests.dist.features import models  # noqa: E402

_STEPS, _MICRO = 2, 2


def _join(folder: str | None = None) -> None:
    torch.set_num_threads(1)
    if folder is not None:
        os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{os.environ['RANK']}"
        importlib.import_module("echelon.recorder.current")._opened = False  # the server's
    dist.init(reduction="rank_ordered", timeout_s=600.0)  # a rank waits while another compiles


def _train(
    rank,
    size,
    *,
    kind="causal",
    schedule="1f1b",
    backend=None,
    per_block=False,
    by=None,
    lengths=(models.CONTEXT,) * _STEPS,
    optimizer_by=None,
    **compiled_how,
):
    """Train this rank's stage; return its state. `by` runs each step."""
    torch._dynamo.reset()
    model = models.Model(kind, stage=rank)
    if per_block:
        for block in model.blocks.values():
            block.compile(backend=backend, **compiled_how)
    elif backend is not None:
        model.compile(backend=backend, **compiled_how)
    pipe = _pipe(model, rank, size, dist.world(), schedule)
    optimizer = models.sgd(model)
    take_step = optimizer.step
    if optimizer_by is not None:
        take_step = torch.compile(take_step, backend=optimizer_by)
    step_of = pipe.step if by is None else by(pipe.step)
    for step, length in enumerate(lengths):
        ids, targets = models.batch(step, 2 * _MICRO, length)
        step_of(ids if rank == 0 else None, targets if rank == size - 1 else None)
        take_step()
        optimizer.zero_grad()
    return models.state_of(model)


def _pipe(model, rank, size, group, schedule="1f1b"):
    return Pipeline(
        [Stage(model, index=rank, num_stages=size)], group=group, schedule=schedule,
        num_microbatches=_MICRO, loss_fn=models.loss_fn,
    )  # fmt: skip


def _ways(rank, size, backend, folder):
    _join(folder)
    torch._functorch.config.donated_buffer = False  # inductor's graphs serve both halves
    found = {}
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        expected = _train(rank, size, schedule=schedule)
        for way, options in {
            "stage": {"backend": backend},
            "each block": {"backend": backend, "per_block": True},
        }.items():
            state = _train(rank, size, schedule=schedule, **options)
            found[f"{schedule}, {way}"] = models.distance(state, expected)
    for name in ("MATH", "FLASH_ATTENTION"):
        kind = f"causal {name}"
        expected = _train(rank, size, kind=kind)
        state = _train(rank, size, kind=kind, backend=backend)
        found[name] = models.distance(state, expected)
    expected = _train(rank, size)
    found["optimizer"] = models.distance(_train(rank, size, optimizer_by=backend), expected)
    dist.shutdown()
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_stages_train_bit_for_bit_as_eager_ones(tmp_path, backend):
    for found in run_ranks(_ways, 2, backend, str(tmp_path), timeout_s=240):
        assert len(found) == 7
        assert set(found.values()) == {0.0}, found
    for rank in range(2):
        ring = read_ring(Path(tmp_path, f"rank_{rank}", "ring"))
        kinds = {ring.strings[row["operation"]] for row in ring.operations}
        assert {"send", "recv"} <= kinds


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_stages_compiled_by_inductor_train_as_eager_ones(tmp_path):
    for found in run_ranks(_ways, 2, "inductor", str(tmp_path), timeout_s=600):
        assert max(found.values()) < 1e-5, found


def _compiled_backward(rank, size):
    import torch._dynamo.compiled_autograd as compiled_autograd

    def by(step):
        def run(*args):
            with compiled_autograd._enable(torch.compile(backend="eager"), dynamic=False):
                return step(*args)

        return run

    _join()
    found = {}
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        expected = _train(rank, size, schedule=schedule)
        found[schedule] = models.distance(_train(rank, size, schedule=schedule, by=by), expected)
    dist.shutdown()
    return found


@pytest.mark.slow
def test_stages_train_under_compiled_autograd():
    for found in run_ranks(_compiled_backward, 2, timeout_s=500):
        assert found == {"1f1b": 0.0, "interleaved_zero_bubble": 0.0}


def _lengths(rank, size):
    from torch._dynamo.utils import counters

    _join()
    lengths = (16, 9, 12, 7, 16, 10)
    expected = _train(rank, size, lengths=lengths)
    found = []
    for dynamic in (None, True, False):
        counters.clear()
        state = _train(
            rank, size, backend="eager", per_block=True, lengths=lengths, dynamic=dynamic
        )
        found.append((models.distance(state, expected), counters["stats"]["unique_graphs"]))
    dist.shutdown()
    return found


@pytest.mark.slow
def test_batches_of_many_lengths_compile_a_stages_block_twice_at_most():
    for found in run_ranks(_lengths, 2, timeout_s=240):
        assert found == [(0.0, 2), (0.0, 1), (0.0, 5)], "automatic, always, never dynamic"


def _refused(rank, size):
    """Return each rank's error for an attention that torch cannot train with here."""
    _join()
    kinds = [f"causal {name}" for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION")]
    errors = {}
    for kind in [*kinds, *(f"flex {mask}" for mask in models.MASKS)]:
        group = dist.new_group(range(size), kind.replace(" ", "_"))
        pipe = _pipe(models.Model(kind, stage=rank), rank, size, group)
        ids, targets = models.batch(0, 2 * _MICRO)
        with pytest.raises((RuntimeError, CollectiveError)) as caught:
            pipe.step(ids if rank == 0 else None, targets if rank == size - 1 else None)
        errors[kind] = str(caught.value)
        dist.world().barrier()  # the error ended the group of the stages, and no other
    expected = _train(rank, size)
    assert models.distance(_train(rank, size), expected) == 0.0, "others train on"
    dist.shutdown()
    return errors


@pytest.mark.slow
def test_attention_that_torch_cannot_train_with_fails_on_all_ranks_with_torchs_error():
    by_rank = run_ranks(_refused, 2, timeout_s=240)
    for kind in by_rank[0]:
        texts = [errors[kind] for errors in by_rank]
        wanted = "does not support backward on CPU" if "flex" in kind else "No viable backend"
        assert all(wanted in text for text in texts), (kind, texts)


def _evaluated(rank, size):
    _join()
    ids, _ = models.batch(0, 2 * _MICRO)
    found = []
    for mask in models.MASKS:
        expected = models.Model(mask)(ids)
        for backend in (None, "eager"):
            torch._dynamo.reset()
            model = models.Model(f"flex {mask}", stage=rank)
            if backend is not None:
                model.compile(backend=backend)
            outputs = _pipe(model, rank, size, dist.world()).evaluate(ids if rank == 0 else None)
            if outputs is not None:
                found.append(float((torch.cat(outputs) - expected).abs().max()))
    dist.shutdown()
    return found


@pytest.mark.slow  # FlexAttention without a compiler
def test_stages_evaluate_flex_attention_as_sdpa_does():
    first, last = run_ranks(_evaluated, 2, timeout_s=240)
    assert first == []
    assert len(last) == 4
    assert max(last) < 1e-5
