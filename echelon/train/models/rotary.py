"""Apply rotary position embeddings: rotate feature pairs by angles proportional to the position.

Features d and d + D/2 form a pair, as in the Llama weights published for `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.train.models.config import ModelConfig, RotaryScaling


def frequencies(config: ModelConfig) -> Tensor:
    """Return the rotation of each pair of features in radians per position.

    Returns:
        float32 [D / 2], on the CPU.
    """
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.int64, device="cpu").float()
    plain = 1.0 / (config.rotary_base ** (exponents / config.head_width))
    scaling = config.rotary_scaling
    if scaling is None:
        return plain
    return plain / scaling.factor if scaling.kind == "linear" else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Scale the frequencies as in Llama 3.1's model code."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context / wavelengths
    share = (turns - low) / (high - low)
    between = (1 - share) * plain / scaling.factor + share * plain
    divided = torch.where(turns < low, plain / scaling.factor, between)
    return torch.where(turns > high, plain, divided)


class RotaryTable(nn.Module):
    """The cosines and sines of every position's angles.

    The table stays float32 even if the model is converted to another dtype, because bfloat16 cannot
    distinguish the angles of adjacent positions. The table is recomputed when a model is moved off
    the meta device.

    Attributes:
        table: the cosines and sines: float32 [2, context, D / 2]; not saved in checkpoints.
    """

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        empty = torch.empty(2, config.context, config.head_width // 2, dtype=torch.float32)
        self.register_buffer("table", empty, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table on its device; do nothing on the meta device."""
        if self.table.is_meta:
            return
        positions = torch.arange(self.config.context, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, frequencies(self.config))
        with torch.no_grad():
            self.table.copy_(torch.stack((angles.cos(), angles.sin())))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the table without changing its dtype, and recompute its values."""
        result: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.table.dtype != torch.float32:
            self.table = torch.empty_like(self.table, dtype=torch.float32)
        self.reset_parameters()
        return result

    def forward(self) -> Tensor:
        """Return the table of cosines and sines."""
        return self.table


def rotate(x: Tensor, table: Tensor, start: int = 0) -> Tensor:
    """Rotate each pair of features of `x` by the pair's angle at each position.

    Args:
        x: the features: [B, H, T, D].
        table: the table of a `RotaryTable`: [2, at least start + T, D / 2].
        start: the position of the first token.
    """
    cos, sin = table[:, start : start + x.shape[-2]].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
