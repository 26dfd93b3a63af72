"""A decoder-only transformer over tokens, small enough to read in one sitting.

It has pre-norm blocks, rotary positions, causal attention through `F.scaled_dot_product_attention`,
and an output head that shares its weights with the token embedding. It has no dropout, and no
options that the example does not use.

Shapes in the comments: B sequences, T tokens, C width, H heads, D = C / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor, nn

from echelon.dist.parallel import Plan

INIT_STD = 0.02  # GPT-2's
ROTARY_BASE = 10_000.0  # RoFormer's, Su et al. 2021


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a model; `width` must be a multiple of `heads`, and of two per head."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256  # tokens; bytes by default

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: a size is below one, or the width is not divisible by the heads.
        """
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not split into {self.heads} heads of an even size"
            )

    def num_parameters(self) -> int:
        """Count the weights of the whole model; the shared embedding counts once."""
        block = 12 * self.width**2 + 4 * self.width
        return self.vocabulary * self.width + self.layers * block + 2 * self.width

    def flops_per_token(self) -> int:
        """Return the cost of training on one token: 6 N + 12 L C T floating-point operations.

        6 N is the sum of two operations per weight in forward and four in backward; N counts the
        embedding once, as the head. 12 L C T is the cost of attention's scores and weighted sum.
        This is the convention of the PaLM paper (appendix B), which ignores the causal mask.
        """
        attention = 12 * self.layers * self.width * self.context
        return 6 * self.num_parameters() + attention


def rotary_table(context: int, head_width: int) -> Tensor:
    """Return the cosines and sines of every position's angles: [2, T, D / 2]."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of features of `x` [B, H, T, D] by its position's angle."""
    cos, sin = table.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Attend from each position to itself and all earlier ones: [B, T, C] -> [B, T, C]."""
        num_sequences, num_tokens, width = x.shape
        heads = self.qkv(x).view(num_sequences, num_tokens, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(num_sequences, num_tokens, width))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Add the outputs of attention and the feed-forward network: [B, T, C] -> [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next token at every position."""

    rotary: Tensor  # cosines and sines: [2, T, D / 2]

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        table = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("rotary", table, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Initialize the weights as in GPT-2, with smaller ones in residual projections."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token: int64 [B, T] -> [B, T, vocabulary]."""
        return F.linear(self.hidden(tokens), self.token.weight)  # tied: the embedding is the head

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the head's input: [B, T, C]."""
        rotary = self.rotary[:, : tokens.shape[1]]
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.final_norm(x)

    def plan(self) -> Plan:
        """Return the plan by which `parallelize` shards the blocks and splits off stages."""
        from gpt.model.stage import GPTStage  # its stages are of this class

        return Plan(blocks=("blocks.*",), stages=GPTStage)

    def num_parameters(self) -> int:
        """Count the weights, sharded or not; the shared embedding counts once."""
        return self.config.num_parameters()

    def flops_per_token(self) -> int:
        """Return the cost of training on one token."""
        return self.config.flops_per_token()
