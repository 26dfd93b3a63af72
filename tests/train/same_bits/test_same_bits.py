"""Training gives the same bits on any number of ranks, replicated or sharded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.ranks import run_ranks  # noqa: E402
from tests.train.same_bits import model as made  # noqa: E402

pytestmark = pytest.mark.ranks
_slow = pytest.mark.slow


def _train(size, layout, backend="shm", engine="", steps=20):
    environ = {"ECHELON_SHM": engine} if engine else None
    ends = run_ranks(made.train, size, layout, backend, steps, environ=environ, timeout_s=240)
    assert all(end == ends[0] for end in ends)
    return ends[0]


@pytest.fixture(scope="module")
def alone():
    """One process, without sharding: 20 steps, and 200 where a test asks for them."""
    ends = {}

    def of(steps):
        if steps not in ends:
            ends[steps] = _train(1, "replicated", steps=steps)
        return ends[steps]

    return of


@pytest.mark.parametrize(
    ("size", "layout", "backend", "engine"),
    [
        (3, "replicated", "shm", "python"),
        (2, "sharded", "gloo", ""),
        (4, "hsdp", "shm", ""),
        *(
            pytest.param(size, layout, backend, engine, marks=_slow)
            for size in (1, 2, 3, 4, 6, 8)
            for layout in ("replicated", "sharded", "hsdp")
            for backend, engine in (("shm", "native"), ("shm", "python"), ("gloo", ""))
            if layout != "hsdp" or size % 2 == 0
        ),
    ],
)
def test_weights_state_losses_and_norms_have_the_bits_of_one_process(
    size, layout, backend, engine, alone, request
):
    steps = 200 if request.node.get_closest_marker("slow") else 20
    assert _train(size, layout, backend, engine, steps) == alone(steps)


def test_losses_fall_and_the_norm_is_clipped(alone):
    losses, norms, _ = alone(20)
    assert losses[-1] < losses[0]
    assert max(norms) > 0.5
