"""Models divided among ranks train as they do in one process, and load into each other."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

import echelon.dist as dist
from echelon.dist.checkpoint import load, save
from echelon.dist.fsdp import full_state_dict, fully_shard
from echelon.dist.pipeline import Pipeline, Stage
from echelon.train.models import Transformer, make_stage, stage_ties
from tests.support.ranks import run_ranks
from tests.train.models.shapes import GPT2, LLAMA

pytestmark = pytest.mark.ranks
NUM_STEPS = 3


def _made(config):
    torch.manual_seed(5)
    return Transformer(config)


def _batch(config):
    random = torch.Generator().manual_seed(2)
    window = torch.randint(config.vocabulary, (4, 13), generator=random)
    return window[:, :-1], window[:, 1:]


def _loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adam(module):
    return torch.optim.AdamW(module.parameters(), lr=3e-3)


def _train_alone(model, optimizer, num_steps):
    tokens, targets = _batch(model.config)
    losses = []
    for _ in range(num_steps):
        loss = _loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train_divided(rank, size, config, folder):
    """Train some steps as stages and save; go on as shards from the meta device."""
    dist.init(backend="shm")
    tokens, targets = _batch(config)
    stage = make_stage(_made(config), rank, size)
    pipe = Pipeline(
        [Stage(stage, index=rank, num_stages=size)],
        schedule="1f1b", num_microbatches=2, loss_fn=_loss, ties=stage_ties(config, size),
    )  # fmt: skip
    optimizer = _adam(stage)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(pipe.step(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
    save(folder, {"model": stage, "optimizer": optimizer})
    with torch.device("meta"):
        model = Transformer(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = _adam(model)
    load(folder, {"model": model, "optimizer": optimizer})
    rows = slice(rank * 2, rank * 2 + 2)
    for _ in range(NUM_STEPS):
        loss = _loss(model(tokens[rows]), targets[rows])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.tolist() for name, value in full_state_dict(model).items()}
    dist.shutdown()
    whole = _made(
        config
    )  # alone, here: the first optimizer of the test's own process takes seconds
    alone = _train_alone(whole, _adam(whole), 2 * NUM_STEPS)
    expected = {name: value.tolist() for name, value in whole.state_dict().items()}
    piped = [None if one is None else [float(loss) for loss in one] for one in losses[:NUM_STEPS]]
    return piped, losses[NUM_STEPS:], state, alone, expected


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_stages_then_shards_train_as_one_process(config, tmp_path):
    first, last = run_ranks(_train_divided, 2, config, tmp_path / "checkpoint", timeout_s=120.0)
    _, losses, state, alone, expected = first
    piped, other_losses, other_state, *_ = last
    divided = [sum(one) / 2 for one in piped]
    divided += [(a + b) / 2 for a, b in zip(losses, other_losses, strict=True)]
    assert divided == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0] - 0.1
    assert state == other_state
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(state[name]), torch.tensor(value), rtol=1e-3, atol=1e-4
        )
