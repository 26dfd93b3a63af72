"""Two small models by one code: the shapes of Llama (RMSNorm, SwiGLU, shared heads, rotary
positions, an untied head) and of GPT-2 (LayerNorm, GELU, biases, learned positions, a tied head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from echelon.dist.parallel import Plan

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS, CONTEXT = 24, 16, 4, 2, 2, 8


class Attention(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.head, self.llama = WIDTH // HEADS, llama
        shared = (KV_HEADS if llama else HEADS) * self.head
        self.query = nn.Linear(WIDTH, WIDTH, bias=not llama)
        self.key = nn.Linear(WIDTH, shared, bias=not llama)
        self.value = nn.Linear(WIDTH, shared, bias=not llama)
        self.out = nn.Linear(WIDTH, WIDTH, bias=not llama)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.llama:
            q, k = _rotate(q), _rotate(k)
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if llama else None
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=not llama)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=not llama)

    def forward(self, x):
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = Attention(llama), MLP(llama)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, shape: str, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        llama = self.llama = shape == "llama"
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = None if llama else nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(LAYERS))
        self.final_norm = (nn.RMSNorm if llama else nn.LayerNorm)(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if not llama:
            self.head.weight = self.token.weight

    def forward(self, tokens):
        return Stage(self, 0, 1)(tokens)

    def plan(self) -> Plan:
        tensor = {"token": "vocabulary", "head": "head"}
        if not self.llama:
            tensor["position"] = "embedding"
        tensor |= {f"blocks.*.{name}": "region" for name in ("attention", "mlp")}
        tensor |= {f"blocks.*.attention.{name}": "column" for name in ("query", "key", "value")}
        tensor |= {f"blocks.*.mlp.{name}": "column" for name in ("gate", "up")[not self.llama :]}
        tensor |= {"blocks.*.attention.out": "row", "blocks.*.mlp.down": "row"}
        divisors = {"kv_heads": KV_HEADS if self.llama else HEADS}
        return Plan(blocks=("blocks.*",), tensor=tensor, stages=Stage, divisors=divisors)


class Stage(nn.Module):
    def __init__(self, model: Model, index: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        per_stage = LAYERS // num_stages
        mine = range(index * per_stage, (index + 1) * per_stage)
        self.blocks = nn.ModuleDict({str(one): model.blocks[one] for one in mine})
        if self.is_first:
            self.token, self.position = model.token, model.position
        if self.is_last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, x):
        if self.is_first:
            tokens, x = x, self.token(x)
            if self.position is not None:
                x = x + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x)) if self.is_last else x


def make_model(shape: str, vocabulary: int = VOCABULARY) -> Model:
    torch.manual_seed(7)
    return Model(shape, vocabulary)


def make_batch(step: int, size: int = 8, vocabulary: int = VOCABULARY):
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(vocabulary, (size, CONTEXT + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(x):
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
