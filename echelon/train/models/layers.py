"""Define layers that can initialize their weights after being created on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.train.models.config import ModelConfig

INIT_STD = 0.02  # GPT-2's


class Linear(nn.Linear):
    """A linear layer whose weights are drawn from a normal distribution; biases start at zero.

    Args:
        std: the standard deviation of the weights.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        std: float = INIT_STD,
        device: str | None = None,
    ) -> None:
        self.std = std  # the next line draws the weights
        super().__init__(inputs, outputs, bias=bias, device=device)

    def reset_parameters(self) -> None:
        """Initialize the weights at random and the bias to 0, except on the meta device."""
        if self.weight.is_meta:
            return
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding whose weights are drawn from a normal distribution."""

    def reset_parameters(self) -> None:
        """Initialize the weights with random values, unless they are on the meta device."""
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=INIT_STD)


class RMSNorm(nn.Module):
    """A norm that divides each position's features by their RMS, in float32 as in Llama."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim of `x` without changing its dtype."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm layer that a config selects."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.eps)
    return nn.LayerNorm(config.width, eps=config.eps, bias=config.bias)
