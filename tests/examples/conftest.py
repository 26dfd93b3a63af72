"""The examples are scripts: their folder goes on the path, as it does when they are run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the examples train with PyTorch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from gpt.model.transformer import GPTConfig  # noqa: E402
from gpt.text.corpus import Corpus, load_corpus  # noqa: E402 -- needs the path
from gpt.training.loop import Trainer, TrainingSettings  # noqa: E402

from tests.examples import runs  # noqa: E402, F401 -- texts are prepared in its folder

TEXT = b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(2000))


class LonelyWorld:
    """A world of one whose collectives have nobody to talk to."""

    rank = 0
    size = 1
    ranks = (0,)
    backend = "none"

    def all_reduce(self, x: Any, op: str = "sum") -> None:
        assert op in ("sum", "avg")

    def barrier(self) -> None: ...

    def broadcast(self, x: Any, root: int) -> None:
        assert root == 0


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_bytes(TEXT)
    return load_corpus([str(path)])


@pytest.fixture
def tiny_config() -> GPTConfig:
    return GPTConfig(layers=1, width=16, heads=2, context=16)


@pytest.fixture
def make_trainer(corpus: Corpus, tiny_config: GPTConfig) -> Iterator[Any]:
    """Return a function that builds a trainer in a world of one."""
    made = []

    def make(**changes: Any) -> Trainer:
        options = {"steps": 20, "batch": 4, "lr": 3e-3, "warmup": 3, "clip": 1.0, "seed": 0}
        settings = TrainingSettings(**{**options, **changes})
        made.append(Trainer.build(tiny_config, settings, corpus, world=LonelyWorld()))
        return made[-1]

    yield make
    for trainer in made:
        trainer.source.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute as the examples do: on one thread, which also makes sums repeatable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)
