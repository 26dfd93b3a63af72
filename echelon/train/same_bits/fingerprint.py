"""Hash all weights and the optimizer's state, with equal results for any number of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.states import Shard, is_part, shards


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the SHA-256 of a model's parameters and buffers, and of its optimizer's state.

    Equal values give equal fingerprints, whether replicated or sharded, on any number of ranks. For
    a sharded model, the call is collective and assembles one parameter at a time.

    Args:
        model: the model, which may be sharded by `fully_shard`.
        optimizer: the optimizer of the model's parameters; None means that only the weights are
            hashed.

    Raises:
        CollectiveError: a rank is lost or did not join.
    """
    found = hashlib.sha256()
    divided = {id(shard.parameter): shard for shard in shards(model).values()}
    groups = {id(one.shard): one.flat.group for one in _members(model)}
    for name, parameter in model.named_parameters():
        shard = divided.get(id(parameter))
        values = {"": parameter.detach()}
        if optimizer is not None:
            values |= _state(optimizer, parameter)
        for key, value in values.items():
            found.update(f"{name} {key} ".encode())
            if shard is not None and is_part(value, shard):
                found.update(_bytes(_whole(value, shard, groups[id(parameter)])))
            else:
                found.update(_bytes(value))
    for name, buffer in model.named_buffers():
        found.update(f"{name} ".encode() + _bytes(buffer))
    return found.hexdigest()


def _members(model: nn.Module) -> list[Any]:
    from echelon.dist.fsdp.parameters.flat import member_of

    found = (member_of(parameter) for parameter in model.parameters())
    return [member for member in found if member is not None]


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    return dict(sorted(optimizer.state.get(parameter, {}).items()))


def _whole(part: torch.Tensor, shard: Shard, group: Any) -> torch.Tensor:
    """Return the bytes of a whole tensor, computed as the sum of the ranks' zero-padded parts."""
    numel = torch.Size(shard.shape).numel()
    whole = torch.zeros(numel, dtype=part.dtype, device=part.device)
    whole[shard.start : shard.start + shard.length] = part.detach().reshape(-1)
    message = whole.view(torch.uint8)
    group.all_reduce(message, op="sum")
    return message


def _bytes(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
