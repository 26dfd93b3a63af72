"""A pipeline has the bits of the whole model in one process, with replicas or shards of stages."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from echelon.analysis.cli import main as analyze  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.train.same_bits.staged import WHOLE, Layout, train  # noqa: E402

pytestmark = pytest.mark.ranks
_slow = pytest.mark.slow
_BACKENDS = (("shm", "native"), ("shm", "python"), ("gloo", ""))
_LAYOUTS = [
    (1, Layout("replicated", 2, "interleaved_1f1b")),
    (2, Layout("replicated", 2)),
    (3, Layout("replicated", 3, "gpipe")),
    (3, Layout("sharded", 1)),
    (4, Layout("replicated", 4, "interleaved_1f1b")),
    (4, Layout("sharded", 2)),
    (6, Layout("sharded", 2)),
    (6, Layout("replicated", 3)),
    (8, Layout("sharded", 4, "zbv")),
    (8, Layout("replicated", 2)),
    (8, Layout("hsdp", 2)),
]
_CHANGES = [(size, Layout(dp)) for size in (1, 2, 3, 4, 6, 8) for dp in ("replicated", "sharded")]
_CHANGES += [(size, Layout("hsdp")) for size in (2, 4, 6, 8)] + _LAYOUTS


def _train(size, layout, steps, backend="shm", engine="", **settings):
    environ = {"ECHELON_SHM": engine} if engine else None
    ends = run_ranks(
        train, size, layout, backend, steps, 5, settings.get("folder"), settings.get("checkpoint"),
        environ=environ, timeout_s=600,
    )  # fmt: skip
    assert all(end == ends[0] for end in ends)
    return ends[0]


@pytest.fixture(scope="module")
def whole():
    """Losses, norms and fingerprint of the whole model, by the number of steps."""
    ends = {}

    def of(steps):
        if steps not in ends:
            ends[steps] = _train(1, WHOLE, (0, steps))
        return ends[steps]

    return of


@pytest.mark.parametrize(
    ("size", "layout", "backend", "engine"),
    [
        (4, Layout("sharded", 4, "zbv"), "shm", ""),
        *(
            pytest.param(size, layout, backend, engine, marks=_slow)
            for size, layout in _LAYOUTS
            for backend, engine in _BACKENDS
        ),
    ],
    ids=str,
)
def test_a_pipeline_has_the_bits_of_the_whole_model(size, layout, backend, engine, whole, request):
    steps = 200 if request.node.get_closest_marker("slow") else 4
    assert _train(size, layout, (0, steps), backend, engine) == whole(steps)


@pytest.mark.parametrize(
    "ends", [(2, 3, 4), pytest.param(None, marks=_slow)], ids=["2 changes", "20 changes"]
)
def test_changes_of_size_on_the_way_change_no_bit(ends, whole, tmp_path):
    """Through checkpoints; the slow one draws 20 steps, sizes and layouts, and prints its seed."""
    seed = random.randrange(1 << 32)
    drawn = random.Random(seed)
    parts = [(3, Layout("sharded")), (2, Layout("sharded", 2)), (2, WHOLE)]
    if ends is None:
        ends = (*sorted(drawn.sample(range(1, 200), 20)), 200)
        parts = [drawn.choice(_CHANGES) for _ in ends]
    print(f"seed {seed}")
    losses, norms = [], []
    for steps, (size, layout) in zip(zip((0, *ends), ends, strict=False), parts, strict=True):
        part = _train(size, layout, steps, checkpoint=str(tmp_path))
        losses += part[0]
        norms += part[1]
    assert (losses, norms, part[2]) == whole(ends[-1])


@_slow
def test_fingerprints_of_a_pipeline_are_compared_with_those_of_the_whole_model(tmp_path, capsys):
    runs = [(1, WHOLE), (2, Layout("replicated", 2))]
    folders = [str(tmp_path / str(number)) for number in range(2)]
    for (size, layout), folder in zip(runs, folders, strict=True):
        _train(size, layout, (0, 2), folder=folder)
    assert analyze(["--compare", *folders]) == 0
    assert "the same bits in 10 micro-batches of steps 0 to 1" in capsys.readouterr().out
