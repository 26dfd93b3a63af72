"""Clipping gradients by the norm of all of them, wherever they lie."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from echelon.dist.fsdp.flat import member_of
from echelon.dist.fsdp.unit import units_of
from echelon.dist.group import ProcessGroup


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`; return what it was.

    The norm is summed in float64, in rank order, from one number of each rank: the same bits
    everywhere. A parameter that is not sharded counts once, as group rank 0 sees it. Collective;
    blocks until the gradients are there.

    Args:
        module: the sharded model.
        max_norm: upper bound; infinite: nothing is scaled.
        norm_type: 2.0, another positive number, or infinity.

    Raises:
        ValueError: a bad argument.
        CollectiveError: a rank is lost or did not come.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(f"max_norm {max_norm!r} must be >= 0 and norm_type {norm_type!r} > 0")
    plain, sharded = _gradients(module)
    total = 0.0
    for number, (group, gradients) in enumerate(sharded.items()):
        mine = gradients + (plain if number == 0 and group.rank == 0 else [])
        total = _join([total, *_everyones(group, _measure(mine, norm_type), module)], norm_type)
    if not sharded:
        total = _measure(plain, norm_type)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1.0:  # NaN too: the gradients show it then, as with torch's
        for gradient in itertools.chain(plain, *sharded.values()):
            gradient.mul_(scale)
    return norm


def _gradients(
    module: nn.Module,
) -> tuple[list[torch.Tensor], dict[ProcessGroup, list[torch.Tensor]]]:
    """Return the gradients of what is not sharded, and of the shards by their group."""
    plain: list[torch.Tensor] = []
    sharded: dict[ProcessGroup, list[torch.Tensor]] = {
        unit.driver.group: [] for unit in units_of(module) if unit.trains
    }
    seen: set[int] = set()
    for parameter in module.parameters():
        member = member_of(parameter)
        owner = parameter if member is None else member.shard
        if owner.grad is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        if member is None:
            plain.append(owner.grad)
        else:
            sharded[member.flat.group].append(owner.grad)
    return plain, sharded


def _measure(gradients: list[torch.Tensor], norm_type: float) -> float:
    """Return the greatest absolute value, or the sum of powers."""
    norms = [
        float(torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64))
        for gradient in gradients
        if gradient.numel()
    ]
    if math.isinf(norm_type):
        return _join(norms, norm_type)
    return _join([norm**norm_type for norm in norms], norm_type)


def _join(values: list[float], norm_type: float) -> float:
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=0.0) if math.isinf(norm_type) else math.fsum(values)


def _everyones(group: ProcessGroup, value: float, module: nn.Module) -> list[float]:
    """Return every rank's number, in rank order."""
    device = next(unit.flats[0].device for unit in units_of(module) if unit.flats)
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    everyones = mine.new_empty(group.size)
    group.all_gather(everyones, mine)
    result: list[float] = everyones.tolist()
    return result
