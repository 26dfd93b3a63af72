"""Clip gradients by their total norm over all ranks.

Each element of each gradient is counted once. A shard is counted by the rank that holds it. If
several ranks hold copies of a shard (HSDP) or of an unsharded parameter, each rank counts an equal
fraction of it. If units are sharded over several groups, for example because of experts, the norm
is summed over the group that contains all of their ranks. The argument `over` adds ranks that hold
other parameters, such as the ranks of other pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import Member, member_of
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.fsdp.uncompiled import uncompiled_call
from echelon.dist.group import ProcessGroup


@uncompiled_call
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    over: ProcessGroup | None = None,
    replicas: ProcessGroup | None = None,
    aliases: Iterable[torch.Tensor] = (),
) -> float:
    """Scale all gradients in place so that their total norm is at most `max_norm`.

    The norm is summed in float64 and in rank order, so it is bitwise identical on every rank.
    Collective among the ranks of `over`.

    Args:
        parameters: the sharded model, or some of its parameters.
        max_norm: the upper bound on the norm. If the bound is infinite, gradients are never scaled.
        norm_type: 2.0, another positive number, or infinity.
        over: a group of all ranks that hold any of the model's parameters, including those of other
            pipeline stages or experts. None means the largest group over which parameters are
            sharded.
        replicas: the ranks that hold equal copies of the unsharded parameters. None means the
            largest group over which parameters are sharded, if any.
        aliases: parameters whose gradients are scaled here but counted by another rank, such as the
            second copy of a tied embedding.

    Returns:
        The norm before scaling, which is equal on all ranks of `over`.

    Raises:
        ValueError: an argument is invalid, or no single group contains all the ranks among which
            parameters are sharded.
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> _ = fully_shard(model)
        >>> loss_fn(model(tokens), targets).backward()
        >>> norm = clip_grad_norm_(model, 1.0)
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(
            f"max_norm must be >= 0 and norm_type > 0, got {max_norm!r} and {norm_type!r}"
        )
    owners = _owners(parameters)
    skipped = {id(_owner(parameter)) for parameter in aliases}
    groups = _groups(parameters, owners)
    over = largest(groups) if over is None else over
    _check_over(over, groups)
    counted = [
        (one.grad, _share(one, over, replicas or (groups[0] if groups else None)))
        for one in owners
        if id(one) not in skipped and one.grad is not None
    ]
    mine = _measure([(grad, share) for grad, share in counted if share and grad.numel()], norm_type)
    total = _total(over, mine, norm_type)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    scale = max_norm / (norm + 1e-6)
    gradients = [] if math.isinf(max_norm) else [one.grad for one in owners if one.grad is not None]
    if gradients and not scale >= 1.0:  # NaN too: the gradients show it then, as with torch's
        torch._foreach_mul_(gradients, scale)
    return norm


def _owner(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose `.grad` the optimizer uses: the parameter itself or its shard."""
    member = member_of(parameter)
    return parameter if member is None else member.shard


def _owners(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    owners = {id(owner): owner for owner in map(_owner, parameters)}
    return list(owners.values())


def _groups(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], owners: list[torch.Tensor]
) -> list[ProcessGroup]:
    """Return the groups over which parameters are sharded, largest first.

    The result is the same on all ranks, even if some units have no gradients on this rank.
    """
    found: dict[ProcessGroup, None] = {}
    if isinstance(parameters, nn.Module):
        found.update(
            (flat.group, None)
            for unit in units_of(parameters)
            if unit.trains
            for flat in unit.flats
        )
    members = [member for member in map(member_of, owners) if member is not None]
    found.update((group, None) for group in groups_of(members))
    return sorted(found, key=lambda group: -group.size)


def groups_of(members: Iterable[Member]) -> list[ProcessGroup]:
    """Return the groups across which parameters are sharded, largest first."""
    found = {member.flat.group: None for member in members}
    return sorted(found, key=lambda group: -group.size)


def largest(groups: list[ProcessGroup]) -> ProcessGroup | None:
    """Return the largest group, or None if `groups` is empty.

    `groups` must be sorted by descending size.

    Raises:
        ValueError: the largest group does not contain all ranks of another group.
    """
    if len(groups) < 2:
        return groups[0] if groups else None
    first = groups[0]
    for group in groups[1:]:
        if not set(group.ranks) <= set(first.ranks):
            raise ValueError(
                f"the parameters are split across groups {first.name!r} and {group.name!r}, "
                "neither of which contains all of the ranks: pass over=, a group that contains "
                "all of them"
            )
    return first


def _check_over(over: ProcessGroup | None, groups: list[ProcessGroup]) -> None:
    for group in groups:
        if over is None or not set(group.ranks) <= set(over.ranks):
            raise ValueError(
                f"over={over!r} must contain all ranks of group {group.name!r}, which shards "
                f"parameters across ranks {list(group.ranks)}"
            )


def _share(owner: torch.Tensor, over: ProcessGroup | None, replicas: ProcessGroup | None) -> float:
    """Return the weight of this rank's gradient in the sum across the ranks of `over`."""
    member: Member | None = member_of(owner)
    if member is not None:
        replicas = member.flat.replicas
    if replicas is None or over is None:
        return 1.0
    return 1.0 / len(set(replicas.ranks) & set(over.ranks))


def _measure(counted: list[tuple[torch.Tensor, float]], norm_type: float) -> torch.Tensor:
    """Return this rank's contribution to the total norm, as float64 [1].

    If `norm_type` is infinite, the contribution is the largest absolute value of the gradients'
    elements. Otherwise it is a weighted sum of the absolute values, each raised to the power
    `norm_type`.
    """
    by_device: dict[torch.device, list[tuple[torch.Tensor, float]]] = {}
    for grad, share in counted:
        by_device.setdefault(grad.device, []).append((grad, share))
    sums = []
    for device, here in by_device.items():
        grads = [grad for grad, _ in here]
        norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float64))
        if math.isinf(norm_type):
            sums.append(norms.max())
            continue
        shares = torch.tensor([share for _, share in here], dtype=torch.float64, device=device)
        sums.append((norms.pow(norm_type) * shares).sum())
    if not sums:
        return torch.zeros(1, dtype=torch.float64)
    first = sums[0].device
    together = torch.stack([one.to(first) for one in sums])
    total = together.max() if math.isinf(norm_type) else together.sum()
    return total.reshape(1)


def _total(over: ProcessGroup | None, mine: torch.Tensor, norm_type: float) -> float:
    """Return the sum or maximum of all ranks' contributions. Collective.

    The function synchronizes with the device.
    """
    values = mine
    if over is not None and over.size > 1:
        values = mine.new_empty(over.size)
        over.all_gather(values, mine)
    numbers: list[float] = values.tolist()
    if any(math.isnan(value) for value in numbers):
        return math.nan
    return max(numbers) if math.isinf(norm_type) else math.fsum(numbers)
