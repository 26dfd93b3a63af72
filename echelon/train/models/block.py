"""Define a layer of a transformer: attention and a feed-forward network, each preceded by a norm.

Separate layers compute queries, keys and values, so that tensor parallelism can split each layer
into whole heads. A rank's layers can therefore have fewer heads than the model, so the code infers
the number of heads from the tensors' shapes.

Shapes: B sequences, T tokens, C width, H heads, D head width, F hidden.
"""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor, nn

from echelon.train.models.config import ModelConfig
from echelon.train.models.layers import INIT_STD, Linear, make_norm
from echelon.train.models.rotary import rotate


class Attention(nn.Module):
    """Causal self-attention, in which several query heads can share one key-value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
        bias = config.bias or config.qkv_bias
        self.query = Linear(config.width, queries, bias=bias)
        self.key = Linear(config.width, keys, bias=bias)
        self.value = Linear(config.width, keys, bias=bias)
        self.out = Linear(queries, config.width, bias=config.bias, std=_residual_std(config))

    def forward(self, x: Tensor, rotary: Tensor | None, mask: Tensor | None) -> Tensor:
        """Attend from each position to itself and earlier positions: [B, T, C] -> [B, T, C].

        If a `mask` is passed, it selects the positions instead.

        Args:
            x: the features of all positions.
            rotary: the table of a `RotaryTable`; if None, queries and keys are not rotated.
            mask: for each position, the positions that it can attend to: bool [B, 1, T, T]. None
                means the position itself and all earlier positions.
        """
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        mixed = attend(query, key, value, mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        """Split the features into heads: [B, T, H D] -> [B, H, T, D]."""
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Return the output of attention: [B, H, T, D].

    Keys and values can have fewer heads than queries.
    """
    group = query.shape[1] // key.shape[1]
    if group > 1 and mask is not None:  # few kernels support both fewer heads and a mask
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        group = 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=group > 1
    )


class SwiGLU(nn.Module):
    """A gated feed-forward network: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.hidden, bias=config.bias)
        self.up = Linear(config.width, config.hidden, bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: [B, T, C] -> [B, T, C]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class GELU(nn.Module):
    """A two-layer feed-forward network: down(gelu(up(x))), with GPT-2's tanh approximation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.hidden, bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position: [B, T, C] -> [B, T, C]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer layer: attention and a feed-forward network, each preceded by a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GELU(config)

    def forward(self, x: Tensor, rotary: Tensor | None, mask: Tensor | None) -> Tensor:
        """Add the outputs of attention and the feed-forward network to `x`, in turn: [B, T, C]."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


def _residual_std(config: ModelConfig) -> float:
    """Return the initial std of the weights that write to the residual stream, as in GPT-2."""
    return INIT_STD / math.sqrt(2 * config.layers)
