"""What a rank does for test_gpt_layouts.py: train a model in one layout, and tell the losses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
from gpt.model.transformer import GPTConfig
from gpt.text.corpus import load_corpus
from gpt.text.data import validation_windows
from gpt.training.loop import Trainer
from gpt.training.settings import TrainingSettings

import echelon.dist as dist
from echelon.dist.checkpoint import save
from echelon.train.models import gpt2, llama

SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 16, "vocabulary": 320}
CONFIGS = {
    "gpt": GPTConfig(**SIZES),
    "gpt2": gpt2(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, hidden=32),
}


def train(
    kind: str, tokens: str, layout: dict[str, Any], *, num_steps: int, folder: str, resume: bool
) -> tuple[list[float], float]:
    """Train; return the losses and the validation loss.

    Args:
        layout: settings of training.
        folder: where it is saved at the end, or resumed from.
    """
    torch.set_num_threads(1)
    options = {"steps": 8, "batch": 4, "lr": 3e-3, "warmup": 0, "clip": 0.5, "seed": 0}
    settings = TrainingSettings(**{**options, **layout})
    corpus = load_corpus([tokens])
    trainer = Trainer.build(CONFIGS[kind], settings, corpus, world=dist.world())
    if resume:
        trainer.resume(folder)
    losses = [trainer.train_step() for _ in range(num_steps)]
    windows = validation_windows(corpus.validation, num_windows=4, context=16)
    validation = trainer.validate(windows)
    if not resume:
        save(folder, trainer.state())
    trainer.source.close()
    whole = trainer.whole()
    assert dataclasses.asdict(whole.config) == dataclasses.asdict(CONFIGS[kind])
    return losses, validation
