"""The model and the samples of every training of the campaign."""

from __future__ import annotations

import torch
from torch import nn

NUM_MICRO_BATCHES = 12  # per step
_WIDTH = 64


def new_model() -> nn.Sequential:
    """Return the initial model, which is the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for the model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def predicted(model: nn.Module, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's predictions for a micro-batch and their targets, both [32, 1]."""
    data = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(32, _WIDTH, generator=data)
    return model(x), x.sin().sum(dim=1, keepdim=True)
