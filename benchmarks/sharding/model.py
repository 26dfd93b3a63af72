"""The char GPT that the sharding benchmark trains, and its data."""

# ruff: noqa: D103 -- a model as anybody would write it
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SEED = 1337


@dataclass(frozen=True)
class Size:
    """A char GPT's sizes, and the global batch size in sequences of `context` tokens."""

    depth: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int = 65


SIZES = {
    "tiny": Size(depth=3, width=128, heads=4, context=64, batch=4),  # to see that it runs
    "10M": Size(depth=6, width=384, heads=6, context=256, batch=8),
    "85M": Size(depth=12, width=768, heads=12, context=256, batch=4),
}


def make_model(size: Size) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
            self.out = nn.Linear(size.width, size.width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = (
                part.view(batch, length, size.heads, -1).transpose(1, 2)
                for part in self.qkv(x).split(width, 2)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(batch, length, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(size.width, bias=False)
            self.attention = Attention()
            self.norm2 = nn.LayerNorm(size.width, bias=False)
            self.up = nn.Linear(size.width, 4 * size.width, bias=False)
            self.down = nn.Linear(4 * size.width, size.width, bias=False)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(size.vocabulary, size.width)
            self.position = nn.Embedding(size.context, size.width)
            self.blocks = nn.ModuleList(Block() for _ in range(size.depth))
            self.norm = nn.LayerNorm(size.width, bias=False)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)
            self.head.weight = self.token.weight
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, ids: Any) -> Any:
            x = self.token(ids) + self.position.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(_SEED)
    return Gpt()


def make_batch(size: Size, step: int, rank: int, ranks: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(_SEED + step)
    shape = (size.batch, size.context + 1)
    ids = torch.randint(0, size.vocabulary, shape, generator=generator)
    per_rank = size.batch // ranks
    mine = ids[rank * per_rank : (rank + 1) * per_rank]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
