"""Every layout of a model trains as one process does."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from tests.dist.parallel.training import train, train_alone  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


def _check(shape, layout, options, num_steps=4, vocabulary=24):
    size = 1
    for number in layout.values():
        size *= number
    steps = range(num_steps)
    results = run_ranks(
        train, size, layout, shape, steps, options, ("", ""), vocabulary, timeout_s=240
    )
    losses, norms = train_alone(shape, num_steps, vocabulary)
    for found, found_norms in results:
        assert found == pytest.approx(losses, abs=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "options"),
    [("llama", {}), ("gpt2", {"sequence": True}), ("gpt2", {"num_microbatches": 2})],
    ids=["llama", "gpt2-sequence", "gpt2-microbatches"],
)
def test_tensor_parallelism_trains_as_one_process(shape, options):
    _check(shape, {"tp": 2}, options)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "layout", "options"),
    [
        ("gpt2", {"shard": 2, "tp": 2}, {"sequence": True}),
        ("llama", {"pp": 2, "tp": 2}, {"num_microbatches": 2}),
    ],
    ids=["shard-tp-sequence", "pp-tp"],
)
def test_axes_combine(shape, layout, options):
    _check(shape, layout, options)


@pytest.mark.ranks
def test_a_vocabulary_that_the_ranks_do_not_divide_stays_whole():
    _check("gpt2", {"tp": 2}, {"sequence": True}, vocabulary=23)


_LAYOUTS = [
    ({"replicate": 2}, {}),
    ({"shard": 2}, {"num_microbatches": 2}),
    ({"shard": 4}, {}),
    ({"replicate": 2, "shard": 2}, {}),
    ({"pp": 2}, {"num_microbatches": 4}),
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sequence": True, "num_microbatches": 2}),
    ({"shard": 2, "tp": 2}, {}),
    ({"replicate": 2, "tp": 2}, {"sequence": True}),
    ({"pp": 2, "tp": 2}, {"num_microbatches": 2, "sequence": True}),
    ({"pp": 2, "shard": 2}, {"num_microbatches": 2}),
    ({"pp": 2, "shard": 2, "tp": 2}, {"num_microbatches": 2}),
    ({"pp": 2, "replicate": 2, "tp": 2}, {"num_microbatches": 2, "sequence": True}),
    ({"replicate": 2, "shard": 2, "tp": 2}, {}),
    ({"pp": 2, "replicate": 2, "shard": 2}, {"num_microbatches": 2, "schedule": "gpipe"}),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize(("layout", "options"), _LAYOUTS)
def test_every_layout_trains_as_one_process_with_a_resume_at_another(
    tmp_path, shape, layout, options
):
    """50 steps; 25 in this layout, the others in the next one of the list."""
    number = _LAYOUTS.index((layout, options))
    later, later_options = _LAYOUTS[(number + 4) % len(_LAYOUTS)]
    losses, norms = train_alone(shape, 50)
    path, end = str(tmp_path / "half"), ""
    found: list[float] = []
    found_norms: list[float] = []
    for axes, how, steps, folders in (
        (layout, options, range(25), ("", path)),
        (later, later_options, range(25, 50), (path, end)),
    ):
        size = math.prod(axes.values())
        results = run_ranks(train, size, axes, shape, steps, how, folders, timeout_s=240)
        found += results[0][0]
        found_norms += results[0][1]
        assert all(one == results[0] for one in results)
    assert found == pytest.approx(losses, abs=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-3)
