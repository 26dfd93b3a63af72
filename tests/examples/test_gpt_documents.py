"""Masked documents: the loss is the mean over the tokens that are trained on, on all ranks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from gpt.text.corpus import load_corpus
from gpt.text.data import NOT_COUNTED, validation_windows
from gpt.training.loop import Trainer, TrainingSettings

from echelon.tokens.prepare import prepare
from echelon.tokens.tokenizer import make_tokenizer
from echelon.train.models import gpt2
from tests.examples.conftest import LonelyWorld

CONFIG = gpt2(layers=1, width=16, heads=2, context=16, vocabulary=320)


class Threads:
    """What ranks that are threads of one process have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.values: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadWorld(LonelyWorld):
    """A world whose ranks are threads."""

    def __init__(self, rank: int, size: int, threads: Threads) -> None:
        self.rank, self.size, self.threads = rank, size, threads

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        self.threads.values[self.rank] = x.clone()
        self.threads.barrier.wait()
        total = torch.stack(self.threads.values).sum(0)
        self.threads.barrier.wait()
        x.copy_(total / self.size if op == "avg" else total)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A corpus whose documents are short or long, so that ranks train on unequal numbers."""
    draw = random.Random(4)
    folder = tmp_path_factory.mktemp("documents") / "tokens"
    sizes = [draw.choice((1, 2, 40)) for _ in range(400)]
    texts = (iter(["abcdefgh"[n % 8] * size]) for n, size in enumerate(sizes))
    prepare(folder, texts, make_tokenizer("bytes"), validation=0.2)
    return load_corpus([str(folder)])


def make(documents, world, *, packs: bool = False) -> Trainer:
    options = {"steps": 9, "batch": 5, "lr": 3e-3, "warmup": 0, "clip": 1e9, "seed": 0}
    settings = TrainingSettings(**options, mask_documents=True, pack_documents=packs)
    return Trainer.build(CONFIG, settings, documents, world=world)


def train(trainer: Trainer, num_steps: int) -> list[float]:
    losses = [trainer.train_step() for _ in range(num_steps)]
    trainer.source.close()
    return losses


def test_the_loss_is_the_mean_over_the_tokens_that_are_trained_on(documents):
    trainer, other = make(documents, LonelyWorld()), make(documents, LonelyWorld())
    batch = other.fetch_batch()
    assert (batch.targets == NOT_COUNTED).any()
    logits = trainer.model(batch.tokens, batch.documents).flatten(0, 1)
    expected = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=NOT_COUNTED)
    assert train(trainer, 1) == pytest.approx([expected.item()], rel=1e-5)
    other.source.close()


def test_packed_documents_are_whole_and_computed_as_if_each_were_alone(documents):
    trainer, other = (make(documents, LonelyWorld(), packs=True) for _ in range(2))
    batch = other.fetch_batch()
    other.source.close()
    assert len(batch.tokens) == 5
    total, count = 0.0, 0
    for tokens, targets, numbers in zip(*batch, strict=True):
        for number in numbers.unique():
            here = numbers == number
            counted = targets[here] != NOT_COUNTED
            logits = trainer.model(tokens[here][None])[0]
            losses = F.cross_entropy(logits, targets[here], ignore_index=NOT_COUNTED)
            total += losses.item() * int(counted.sum()) if counted.any() else 0.0
            count += int(counted.sum())
    assert train(trainer, 1) == pytest.approx([total / count], rel=1e-5)


@pytest.mark.parametrize(("size", "packs"), [(2, False), (3, False), (3, True)])
def test_ranks_and_one_process_train_alike(documents, size, packs):
    alone = make(documents, LonelyWorld(), packs=packs)
    threads = Threads(size)
    ranks, batches = (
        [make(documents, ThreadWorld(rank, size, threads), packs=packs) for rank in range(size)]
        for _ in range(2)
    )
    counts = [int((one.fetch_batch().targets != NOT_COUNTED).sum()) for one in batches]
    for one in batches:
        one.source.close()
    assert len(set(counts)) > 1, "a divisor of each rank's own would go unnoticed"
    with ThreadPoolExecutor(size) as pool:
        losses = list(pool.map(lambda one: train(one, 4), ranks))
    assert losses[0] == pytest.approx(train(alone, 4), abs=1e-5)
    for ours, theirs in zip(ranks[-1].model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_validation_loss_is_the_mean_over_the_targets(documents):
    trainer = make(documents, LonelyWorld())
    windows = validation_windows(documents.validation, num_windows=6, context=16)
    tokens, numbers = torch.from_numpy(windows.tokens), torch.from_numpy(windows.documents)
    targets = tokens[:, 1:].clone()
    targets[numbers[:, 1:] != numbers[:, :-1]] = NOT_COUNTED
    assert windows.num_targets(mask_documents=True) == int((targets != NOT_COUNTED).sum())
    with torch.no_grad():
        logits = trainer.model(tokens[:, :-1], numbers[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert trainer.validate(windows) == pytest.approx(expected.item(), rel=1e-5)
    trainer.source.close()
