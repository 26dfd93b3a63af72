"""What PyTorch 2 offers beside eager mode, in the stages of a pipeline and with the recorder on."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import pytest

from echelon.recorder.read import read_ring
from tests.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

import echelon.dist as dist  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage  # noqa: E402
from tests.dist.features import models  # noqa: E402

_STEPS, _MICRO = 2, 2


def _join(folder: str | None = None, timeout_s: float = 60.0) -> None:
    torch.set_num_threads(1)
    if folder is not None:
        os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{os.environ['RANK']}"
        importlib.import_module("echelon.recorder.current")._opened = False  # the server's
    dist.init(reduction="rank_ordered", timeout_s=timeout_s)


def _train(rank, size, *, kind="causal", schedule="1f1b", backend=None, per_block=False, by=None):
    """Train this rank's stage; return its state. `by` runs each step."""
    torch._dynamo.reset()
    model = models.Model(kind, stage=rank)
    if per_block:
        for block in model.blocks.values():
            block.compile(backend=backend)
    elif backend is not None:
        model.compile(backend=backend)
    pipe = Pipeline(
        [Stage(model, index=rank, num_stages=size)], group=dist.world(), schedule=schedule,
        num_microbatches=_MICRO, loss_fn=models.loss_fn,
    )  # fmt: skip
    optimizer = models.sgd(model)
    step_of = pipe.step if by is None else by(pipe.step)
    for step in range(_STEPS):
        ids, targets = models.batch(step, 2 * _MICRO)
        step_of(ids if rank == 0 else None, targets if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    return models.state_of(model)


def _ways(rank, size, backend, folder):
    _join(folder)
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
    dist.shutdown()
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_stages_train_bit_for_bit_as_eager_ones(tmp_path, backend):
    for found in run_ranks(_ways, 2, backend, str(tmp_path), timeout_s=120):
        assert len(found) == 6
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

    _join(timeout_s=240.0)  # a rank waits while the other compiles
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
