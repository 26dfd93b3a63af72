"""Hash all weights and the optimizer's state, with the same result on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.states import Shard, is_part, shards

if TYPE_CHECKING:
    from echelon.dist.pipeline import Pipeline

_T = TypeVar("_T")


def fingerprint(model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the SHA-256 of a model's parameters and buffers, and of its optimizer's state.

    Equal values give equal fingerprints on any number of ranks, whether the model is replicated,
    sharded or split into stages. For a sharded model or a pipeline, the call is collective.
    Parameters are assembled one at a time.

    Args:
        model: the model, optionally sharded by `fully_shard`, or a pipeline whose stages use the
            parameter names of the whole model.
        optimizer: the optimizer of the model's parameters; None means that only the weights are
            hashed.

    Raises:
        ValueError: two stages of a pipeline have a parameter or buffer of the same name.
        CollectiveError: a rank was lost or did not join.
    """
    if isinstance(model, nn.Module):
        hashes = _hashes("", model, optimizer)
    else:
        mine = [_hashes(stage.prefix, stage.module, optimizer) for stage in model.stages]
        parts = model.group.all_gather_object(mine)
        hashes = joined([one for part in parts for one in part])
    lines = [f"{name} {found}\n" for name, found in sorted(hashes.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def joined(stages: Iterable[dict[str, _T]]) -> dict[str, _T]:
    """Merge the stages' dicts, which are keyed by parameter or buffer name, into one dict.

    Raises:
        ValueError: two stages use the same name.
    """
    found: dict[str, _T] = {}
    for one in stages:
        if twice := sorted(found.keys() & one.keys()):
            raise ValueError(
                f"two stages have a parameter or buffer named {twice[0]!r}: make stages with "
                "split(), which keeps the model's names, or pass Stage(prefix=...)"
            )
        found |= one
    return found


def _hashes(
    prefix: str, module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, str]:
    """Return a hash of each parameter with its optimizer state, and a hash of each buffer."""
    divided = {id(shard.parameter): shard for shard in shards(module).values()}
    found = {}
    for name, parameter in module.named_parameters():
        shard = divided.get(id(parameter))
        values = {"": parameter.detach()}
        if optimizer is not None:
            values |= _state(optimizer, parameter)
        text = hashlib.sha256()
        for key, value in values.items():
            text.update(f"{key} ".encode())
            text.update(_bytes(_whole(value, shard) if _is_part(value, shard) else value))
        found[prefix + name] = text.hexdigest()
    for name, buffer in module.named_buffers():
        found[prefix + name] = hashlib.sha256(_bytes(buffer)).hexdigest()
    return found


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    return dict(sorted(optimizer.state.get(parameter, {}).items()))


def _is_part(value: Any, shard: Shard | None) -> bool:
    return shard is not None and is_part(value, shard)


def _whole(part: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Return a full tensor's bytes, as the sum of the ranks' zero-padded shards. Collective."""
    assert shard is not None
    member = member_of(shard.parameter)
    assert member is not None, shard.name
    numel = torch.Size(shard.shape).numel()
    whole = torch.zeros(numel, dtype=part.dtype, device=part.device)
    whole[shard.start : shard.start + shard.length] = part.detach().reshape(-1)
    message = whole.view(torch.uint8)
    member.flat.group.all_reduce(message, op="sum")
    return message


def _bytes(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
