"""Compute the same gradient norm, bit for bit, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from echelon.dist.canonical.norm import (
    PartialBlocks,
    block_sums,
    tree_total,
    tree_totals,
)
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.member import Member, member_of
from echelon.dist.group import ProcessGroup


def square_sums(module: nn.Module, group: ProcessGroup) -> dict[str, float]:
    """Return the sum of squares of each gradient, keyed by the parameter's name.

    Collective over `group` and the groups of the sharded units. Parameters that all ranks hold in
    full are distributed across the ranks, and each rank computes the sums of its share.

    Args:
        module: a module whose gradients have been reduced.
        group: the ranks across which the micro-batches are split.

    Raises:
        CollectiveError: a rank was lost or did not join.
    """
    parameters = dict(module.named_parameters())
    members = {name: member_of(parameter) for name, parameter in parameters.items()}
    sharded = _sharded([member for member in members.values() if member is not None])
    found = {
        name: sharded[member]
        for name, member in members.items()
        if member is not None and member.shard.grad is not None
    }
    whole = {
        name: parameter.grad.detach().reshape(-1)
        for name, parameter in parameters.items()
        if members[name] is None and parameter.grad is not None
    }
    return _floats(found | _of_whole(whole, group))


def _of_whole(values: Mapping[str, torch.Tensor], group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Return each tensor's sum of squares. All ranks must hold the full tensors. Collective."""
    if not values:
        return {}
    own = _divided({name: one.numel() for name, one in values.items()}, group.size)[group.rank]
    device = next(iter(values.values())).device
    sums = torch.zeros(len(values), dtype=torch.float64, device=device)
    mine = [index for index, name in enumerate(values) if name in own]
    if mine:
        blocks = [block_sums(one) for name, one in values.items() if name in own]
        sums[mine] = tree_totals([one.to(device) for one in blocks])
    if group.size > 1:
        group.all_reduce(sums, op="sum")  # exact: each is zero on all ranks but one
    return dict(zip(values, sums.unbind(), strict=True))


def _floats(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    if not sums:
        return {}
    values = torch.stack([one.cpu() for one in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def _divided(sizes: Mapping[str, int], num_parts: int) -> list[set[str]]:
    """Distribute names across `num_parts` sets of similar total size, identically on all ranks."""
    parts: list[set[str]] = [set() for _ in range(num_parts)]
    loads = [0] * num_parts
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        parts[least].add(name)
        loads[least] += size
    return parts


def norm_of(sums: Mapping[str, float]) -> float:
    """Return the 2-norm of all gradients, given each parameter's sum of squares.

    The sums are added in the order of the parameters' names.
    """
    if not sums:
        return 0.0
    ordered = [sums[name] for name in sorted(sums)]
    return math.sqrt(tree_total(torch.tensor(ordered, dtype=torch.float64)).item())


def _sharded(members: list[Member]) -> dict[Member, torch.Tensor]:
    """Return the sum of squares of each sharded gradient, keyed by its parameter. Collective.

    Each group uses one all_reduce for all of its units.
    """
    units: dict[tuple[ProcessGroup, torch.device], list[Flat]] = {}
    for flat in dict.fromkeys(member.flat for member in members):
        units.setdefault((flat.group, flat.device), []).append(flat)
    found: dict[Member, torch.Tensor] = {}
    for (group, device), flats in units.items():
        parts = [part for flat in flats for part in _blocks(flat)]
        if not parts:
            continue  # on all ranks alike
        sizes = [blocks.message_numel for _, blocks in parts]
        every = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        rows = torch.split(every, sizes)
        for (member, blocks), row in zip(parts, rows, strict=True):
            assert member.shard.grad is not None, member
            blocks.write(row, member.shard.grad.detach().reshape(-1), member.part.start)
        if group.size > 1:
            group.all_reduce(every, op="sum")
        sums = [blocks.read(row) for (_, blocks), row in zip(parts, rows, strict=True)]
        members = [member for member, _ in parts]
        found.update(zip(members, tree_totals(sums).unbind(), strict=True))
    return found


def _blocks(flat: Flat) -> Iterator[tuple[Member, PartialBlocks]]:
    """Yield each parameter that has a gradient, and the `PartialBlocks` of the squared gradient."""
    layout, ranks = flat.layout, range(flat.group.size)
    for index, member in enumerate(flat.members):
        if member.shard.grad is None:
            continue  # on all ranks alike
        parts = [layout.part(index, rank) for rank in ranks]
        bounds = [(part.start, part.start + part.length) for part in parts]
        yield member, PartialBlocks(member.piece.numel, bounds)
