"""Compute the cross entropy of a model's predictions, from all logits at once or in chunks."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import Tensor

from echelon.train.loss import chunked_cross_entropy
from echelon.train.models import Transformer
from gpt.model.transformer import GPT


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy summed over all targets, in nats; logits are [B, T, V]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def summed_loss(model: GPT | Transformer, features: Tensor, targets: Tensor) -> Tensor:
    """Return the same sum from the head's input [B, T, C], one chunk of tokens at a time."""
    weight = model.head.weight if isinstance(model, Transformer) else model.token.weight
    return chunked_cross_entropy(features, weight, targets, reduction="sum")
