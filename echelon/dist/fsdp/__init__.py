"""Shard parameters, gradients and optimizer state across ranks (`fully_shard`)."""

from echelon.dist.fsdp.control import (
    gradient_sync,
    reduce_gradients,
    reshard,
    set_requires_gradient_sync,
    unshard,
)
from echelon.dist.fsdp.guards.clipping import clip_grad_norm_
from echelon.dist.fsdp.guards.scaler import GradScaler
from echelon.dist.fsdp.settings import CPUOffloadPolicy, MixedPrecisionPolicy
from echelon.dist.fsdp.sharding import fully_shard
from echelon.dist.fsdp.states import (
    Shard,
    full_state_dict,
    is_part,
    optimizer_state,
    shards,
)
from echelon.dist.fsdp.step.hooks import register_forward_method

__all__ = [
    "fully_shard",
    "MixedPrecisionPolicy",
    "CPUOffloadPolicy",
    "register_forward_method",
    "clip_grad_norm_",
    "GradScaler",
    "gradient_sync",
    "set_requires_gradient_sync",
    "unshard",
    "reshard",
    "reduce_gradients",
    "full_state_dict",
    "shards",
    "Shard",
    "optimizer_state",
    "is_part",
]
