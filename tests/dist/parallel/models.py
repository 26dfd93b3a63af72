"""Two small models, their data and their loss: of the shapes of Llama and of GPT-2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from echelon.train.models import ModelConfig, Transformer

VOCABULARY, CONTEXT = 24, 8
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"heads": 4, "kv_heads": 2, "hidden": 32},
    "gpt2": {
        "heads": 4,
        "norm": "layer",
        "mlp": "gelu",
        "positions": "learned",
        "tied": True,
        "bias": True,
    },
}


def make_model(shape: str, vocabulary: int = VOCABULARY, **changes: Any) -> Transformer:
    """Return the same model in every process."""
    sizes = {"layers": 2, "width": 16, "context": CONTEXT, "vocabulary": vocabulary}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Transformer(ModelConfig(**(sizes | _SHAPES[shape] | changes)))
        with torch.no_grad():  # of a trained model's size, or nothing but the bias would be learned
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
        return model


def make_batch(
    step: int, size: int = 8, vocabulary: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's tokens and targets: [size, CONTEXT] each."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(vocabulary, (size, CONTEXT + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
