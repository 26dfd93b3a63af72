"""How the ranks divide the work of training: as replicas of the model, or with the model sharded.

Both average the gradients over the ranks, clip them by the norm of all, and know the whole model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.dist.fsdp import (
    GradScaler,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    gradient_sync,
)
from echelon.train.models import Transformer
from gpt.model.transformer import GPT
from gpt.training.gradients import GradientBuckets

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup


def make_scaler(half: torch.dtype | None, over: ProcessGroup) -> GradScaler:
    """Return the scaler of the loss: float16 needs one, other types do not."""
    return GradScaler(over=over, enabled=half is torch.float16)


def make_policy(half: torch.dtype | None) -> MixedPrecisionPolicy | None:
    """Return how shards compute in a 16-bit type: gradients are summed in float32."""
    if half is None:
        return None
    return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)


class Replicas:
    """Every rank has the whole model; gradients are averaged in flat buckets.

    Attributes:
        flats: the gradients, as the buffers that are averaged over the ranks.
        scaler: of the loss.
    """

    def __init__(
        self,
        model: GPT | Transformer,
        world: ProcessGroup,
        bucket_bytes: int,
        half: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.scaler = make_scaler(half, world)
        for parameter in model.parameters():  # all start from rank 0's weights
            world.broadcast(parameter.detach(), root=0)
        self.buckets = GradientBuckets(model.parameters(), bucket_bytes=bucket_bytes)

    @property
    def flats(self) -> list[Tensor]:
        """The gradients, as buffers that are yet to be averaged."""
        return self.buckets.flats

    def zero(self) -> None:
        """Forget the gradients."""
        self.buckets.zero()

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context for one of a step's passes: gradients add up in the buffers."""
        return nullcontext()

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that their joint norm is at most `max_norm`; return the norm."""
        return self.buckets.clip(max_norm)

    def whole(self) -> GPT | Transformer:
        """Return the whole model."""
        return self.model


class Shards:
    """Every rank has a part of each block; backward itself averages the gradients."""

    flats: list[Tensor] = []  # noqa: RUF012 -- none is left to average

    def __init__(
        self, model: GPT | Transformer, world: ProcessGroup, half: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.scaler = make_scaler(half, world)
        precision = make_policy(half)
        for block in model.blocks:
            fully_shard(block, group=world, mp_policy=precision)
        fully_shard(model, group=world, mp_policy=precision)

    def zero(self) -> None:
        """Forget the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one of a step's passes: the last one averages the gradients."""
        return gradient_sync(self.model, enabled=is_last)

    def clip(self, max_norm: float) -> float:
        """Scale the gradients so that their joint norm is at most `max_norm`; return the norm.

        Collective.
        """
        return clip_grad_norm_(self.model, max_norm)

    def whole(self) -> GPT | Transformer:
        """Return a whole model, in the host's memory. Collective."""
        state = full_state_dict(self.model)
        model = type(self.model)(self.model.config)
        model.load_state_dict(state)
        return model
