"""A small char GPT with tied weights and uneven parameters, and one process to compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import echelon.dist as dist

VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH = 61, 16, 36, 3, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 3)
        self.down = nn.Linear(4 * WIDTH + 3, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def join(**settings) -> None:
    """Join the world, with one thread: with more, a loaded machine may sum in another order."""
    torch.set_num_threads(1)
    dist.init(reduction="rank_ordered", **settings)


def make(depth: int = DEPTH, seed: int = 11) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(depth)


def batch(index: int, size: int = 2):
    """Return micro-batch `index` of the whole run: inputs and targets."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, VOCABULARY, (size, CONTEXT + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, index: int):
    ids, targets = batch(index)
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def train_alone(num_ranks: int, steps: int, micro: int = 1, model=None) -> dict[str, torch.Tensor]:
    """Train in one process: each rank's micro-batches added up, then the ranks' sums, divided."""
    model = make() if model is None else model
    optimizer = make_optimizer(model)
    for step in range(steps):
        total: dict[str, torch.Tensor] = {}
        for rank in range(num_ranks):
            optimizer.zero_grad()
            for one in range(micro):
                loss_of(model, (step * num_ranks + rank) * micro + one).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    first = name not in total
                    total[name] = parameter.grad if first else total[name] + parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / num_ranks if name in total else None
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
