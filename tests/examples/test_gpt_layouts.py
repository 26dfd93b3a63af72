"""Each layout, and each way to compute the loss, trains as one process does."""

from __future__ import annotations

import random

import pytest

import echelon.dist as dist
from echelon.tokens.prepare import prepare
from echelon.tokens.tokenizer import make_tokenizer
from tests.examples import layout_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
MASKED = {"mask_documents": True}
CASES = [
    ("llama", 2, {"tp": 2, "ema": 0.5, **MASKED}),
]
SLOW = [
    ("gpt", 2, {"shard": True, "chunked_loss": True, "accumulate": 2, "ema": 0.5}),
    ("gpt2", 4, {"tp": 2, "shard": True, **MASKED}),
    ("llama", 4, {"tp": 2, "pipeline": 2, "microbatches": 2, **MASKED}),
    ("gpt", 4, {"pipeline": 2, "microbatches": 2}),
    ("gpt2", 3, {"pipeline": 1, "shard": True, "chunked_loss": True, **MASKED}),
    ("llama", 3, {"chunked_loss": True, **MASKED}),
    ("llama", 2, {"pipeline": 2, "microbatches": 4, "shard": True}),
    ("gpt2", 4, {"tp": 2, "shard": True, "sequence": True, **MASKED}),
    ("llama", 4, {"tp": 2, "shard": True, "optimizer": "muon"}),
    ("llama", 4, {"tp": 2, "pipeline": 2, "microbatches": 2, "optimizer": "muon"}),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    draw = random.Random(4)
    folder = tmp_path_factory.mktemp("layouts") / "tokens"
    sizes = [draw.choice((1, 2, 40)) for _ in range(300)]
    texts = (iter(["abcdefgh"[n % 8] * size]) for n, size in enumerate(sizes))
    prepare(folder, texts, make_tokenizer("bytes"), validation=0.2)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "layout"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_layout_trains_as_one_process_does_and_goes_on_there(
    tokens, tmp_path, kind, num_ranks, layout
):
    kept = {name: layout[name] for name in ("mask_documents", "ema", "optimizer") if name in layout}
    common = {"folder": str(tmp_path / "c")}
    there = _there(num_ranks, kind, tokens, layout, num_steps=3, resume=False, **common)
    alone = _alone(kind, tokens, kept, num_steps=3, resume=False, folder=str(tmp_path / "d"))
    for losses, validation in there:
        assert losses == pytest.approx(alone[0], abs=1e-5)
        assert validation == pytest.approx(alone[1], abs=1e-5)
    after = _alone(kind, tokens, kept, num_steps=3, resume=True, **common)
    straight = _alone(kind, tokens, kept, num_steps=6, resume=False, folder=str(tmp_path / "e"))
    assert after[0] == pytest.approx(straight[0][3:], abs=1e-5)
    assert after[1] == pytest.approx(straight[1], abs=1e-5)


def _there(num_ranks, *arguments, **options):
    return run_ranks(_rank, num_ranks, arguments, options, timeout_s=120)


def _rank(rank, world_size, arguments, options):
    dist.init()
    result = layout_ranks.train(*arguments, **options)
    dist.shutdown()
    return result


def _alone(*arguments, **options):
    dist.init()
    try:
        return layout_ranks.train(*arguments, **options)
    finally:
        dist.shutdown()
