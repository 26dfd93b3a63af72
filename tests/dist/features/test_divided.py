"""Blocks that are compiled and then divided among ranks, with the recorder on."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from pathlib import Path

import pytest

from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

import echelon.dist as dist  # noqa: E402
from echelon.dist.fsdp import MixedPrecisionPolicy  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from echelon.dist.parallel import parallelize  # noqa: E402
from tests.dist.features import models  # noqa: E402
from tests.dist.parallel.models import loss_of, make_batch, make_model  # noqa: E402

_STEPS = 3


def _train(shape, layout, options, backend=None):
    """Return the losses of this rank's part of a model."""
    torch._dynamo.reset()
    model = make_model(shape)
    for block in model.blocks if backend else ():
        block.compile(backend=backend)
    mesh = DeviceMesh(tuple(layout.values()), tuple(layout))
    parallel = parallelize(model, mesh, loss_fn=loss_of, **options)
    optimizer = models.sgd(parallel)
    part, count = parallel.data
    losses = []
    for step in range(_STEPS):
        inputs, targets = (one.chunk(count)[part] for one in make_batch(step))
        losses.append(float(parallel.step(inputs, targets)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _compare(rank, size, shape, layout, options, backend, folder):
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{rank}"
    importlib.import_module("echelon.recorder.current")._opened = False  # the server's
    dist.init(reduction="rank_ordered", timeout_s=300.0)  # a rank waits while another compiles
    expected = _train(shape, layout, options)
    counters.clear()
    found = _train(shape, layout, options, backend)
    splits = set(counters["graph_break"])
    graphs = counters["stats"]["unique_graphs"]
    dist.shutdown()
    return expected, found, splits, graphs


def _check(tmp_path, shape, layout, options, backend, tolerance):
    size = 1
    for number in layout.values():
        size *= number
    results = run_ranks(
        _compare, size, shape, layout, options, backend, str(tmp_path), timeout_s=600
    )
    for expected, found, splits, graphs in results:
        assert found == pytest.approx(expected, abs=tolerance)
        assert graphs > 0
        calls = [re.search(r"marked that the function `(\w+)`", reason) for reason in splits]
        assert all(calls), f"torch.compile traced into a collective: {splits}"
        assert {"enter", "leave"} <= {call[1] for call in calls}
    for rank in range(size):
        ring = read_ring(Path(tmp_path, f"rank_{rank}", "ring"))
        kinds = {ring.strings[row["operation"]] for row in ring.operations}
        assert ("reduce_scatter" if "sequence" in options else "all_reduce") in kinds


def test_compiled_blocks_of_divided_layers_train_bit_for_bit_as_eager_ones(tmp_path):
    _check(tmp_path, "llama", {"tp": 2}, {}, "eager", 0.0)


@pytest.mark.slow
def test_aot_eager_changes_their_last_bits_at_most(tmp_path):
    """It computes backwards by other formulas than autograd's."""
    _check(tmp_path, "llama", {"tp": 2}, {}, "aot_eager", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layout", "options"),
    [
        ("gpt2", {"tp": 2}, {"sequence": True}),
        ("llama", {"shard": 2, "tp": 2}, {}),
        ("llama", {"pp": 2, "tp": 2}, {"num_microbatches": 2}),
    ],
    ids=["sequence", "shard-tp", "pp-tp"],
)
def test_they_do_in_other_layouts(tmp_path, shape, layout, options):
    _check(tmp_path, shape, layout, options, "eager", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=["pp", "tp"])
def test_compiled_blocks_in_16_bits_train_bit_for_bit_as_eager_ones(tmp_path, layout, dtype):
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    options = {"num_microbatches": 2, "mp_policy": policy}
    results = run_ranks(
        _compare, 2, "llama", layout, options, "eager", str(tmp_path), timeout_s=600
    )
    for expected, found, _, graphs in results:
        assert found == expected
        assert graphs > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_divided_layers_compiled_by_inductor_train_as_eager_ones(tmp_path, monkeypatch, shape):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _check(tmp_path, shape, {"tp": 2}, {}, "inductor", 1e-5)
