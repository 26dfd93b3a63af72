"""States to save and load: a small model with tied weights, its optimizer, and steps to take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import echelon.dist as dist

NUM_SEQUENCES = 12  # divides by 1, 2, 3 and 4 ranks


class Tied(nn.Module):
    """An embedding that is its own head, uneven sizes, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.token.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        x = x + self.scale * self.down(torch.tanh(self.up(x))) * self.frozen.mean()
        self.counts += 1
        return self.head(x)


def make(seed: int = 0) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def batch(step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 13, (NUM_SEQUENCES, 5), generator=generator)
    return tokens.chunk(world_size)[rank]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Take the steps from `first` to before `last` in the world there is; return the losses."""
    world = dist.world()
    losses = []
    for step in range(first, last):
        tokens = batch(step, world.rank, world.size)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                world.all_reduce(parameter.grad, op="avg")
        optimizer.step()
        mean = loss.detach().reshape(1).clone()
        world.all_reduce(mean, op="avg")
        losses.append(mean.item())
    return losses


def same(one: Any, other: Any) -> bool:
    """Compare two trees of tensors and plain values."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
