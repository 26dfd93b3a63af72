"""A small model with everything that tempts bits to differ: dropout, odd sizes, a tied weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import echelon.dist as dist
from echelon.train.same_bits import SameBits, fingerprint

WIDTH, VOCABULARY = 37, 61


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 2)
        self.down = nn.Linear(3 * WIDTH + 2, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, training=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.unused = nn.Parameter(torch.ones(5))  # gets no gradient, ever
        self.seldom = nn.Parameter(torch.ones(7))  # in micro-batch 2 of a step alone

    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Model().to(dtype)


def loss_of(model, step, number, micro_batches):
    """The loss of one micro-batch: its samples depend on its number alone."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    if number == min(2, micro_batches - 1):
        loss = loss + model.seldom.square().sum() * 0.1
    return loss


def shard(model, layout, group):
    from echelon.dist.fsdp import fully_shard
    from echelon.dist.mesh import DeviceMesh

    if layout == "replicated":
        return model
    settings = {"group": group}
    if layout == "hsdp":
        settings = {"mesh": DeviceMesh((group.size // 2, 2), ("replicate", "shard"))}
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def train(rank, size, layout, backend="shm", steps=20, micro_batches=12, make_optimizer=None):
    """Train; return the losses, the norms and the fingerprint."""
    torch.set_num_threads(1)
    group = dist.init(backend, timeout_s=120)
    model = shard(make(seed=rank if layout == "replicated" else 0), layout, group)
    if make_optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = make_optimizer(model)
    same = SameBits(model, optimizer, micro_batches=micro_batches, seed=7)
    losses, norms = [], []
    for step in range(steps):
        losses.append(
            same.backward(step, lambda n, step=step: loss_of(model, step, n, micro_batches))
        )
        norms.append(same.clip_grad_norm_(0.5))
        optimizer.step()
    found = (losses, norms, fingerprint(model, optimizer))
    dist.shutdown()
    return found
