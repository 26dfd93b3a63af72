"""A small character GPT with tied and uneven parameters, and its training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH, BATCH = 29, 20, 7, 2


class Block(nn.Module):
    """Attention and a small network; widths divide by nothing that a test shards by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 53), nn.Linear(53, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in
                   self.qkv(self.norm1(x)).chunk(3, -1))  # fmt: skip
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Embedding, two blocks, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    """Return the loss of a rank's batch."""
    tokens, targets = batch(step, rank)
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of runs that are compared bit for bit."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return one for runs that add in another order: AdamW makes steps of rounding errors."""
    return torch.optim.SGD(model.parameters(), lr=1e-1)


Scale = Callable[[torch.Tensor], torch.Tensor]


def train_alone(
    num_ranks: int,
    num_steps: int,
    before: Scale,
    after: Scale,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
) -> nn.Module:
    """Train in one process on all ranks' batches, adding gradients in rank order.

    Args:
        before: what the wrapper under test does to a rank's gradient before it is added.
        after: what it does to the sum.
    """
    model = Gpt()
    optimizer = make_optimizer(model)
    parameters = list(model.parameters())
    for step in range(num_steps):
        totals: list[torch.Tensor] = []
        for rank in range(num_ranks):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            grads = [before(parameter.grad) for parameter in parameters]
            totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else grads
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = after(total)
        optimizer.step()
    return model
