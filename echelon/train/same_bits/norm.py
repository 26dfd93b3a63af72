"""Compute the gradient norm with the same bits on any number of ranks, replicated or sharded."""

from __future__ import annotations

import math

import torch
from torch import nn

from echelon.dist.canonical.norm import PartialBlocks, block_sums, tree_total
from echelon.dist.fsdp.parameters.flat import Flat, Member, member_of


def grad_norm(module: nn.Module) -> float:
    """Return the 2-norm of all gradients. Collective over the groups of the sharded units.

    Args:
        module: a module whose gradients have been reduced.

    Raises:
        CollectiveError: a rank is lost or did not join.
    """
    parameters = list(module.parameters())
    sharded = _sharded([one for one in map(member_of, parameters) if one is not None])
    sums = []
    for parameter in parameters:
        member = member_of(parameter)
        if member is not None and member.shard.grad is not None:
            sums.append(sharded[member].cpu())
        elif member is None and parameter.grad is not None:
            sums.append(tree_total(block_sums(parameter.grad.detach().reshape(-1))).cpu())
    if not sums:
        return 0.0
    return math.sqrt(tree_total(torch.stack(sums)).item())


def _sharded(members: list[Member]) -> dict[Member, torch.Tensor]:
    """Return the sum of squares of each sharded parameter that has a gradient."""
    flats = dict.fromkeys(member.flat for member in members)
    found: dict[Member, torch.Tensor] = {}
    for flat in flats:
        found.update(_of_flat(flat))
    return found


def _of_flat(flat: Flat) -> dict[Member, torch.Tensor]:
    layout, ranks = flat.layout, range(flat.group.size)
    blocks, messages = {}, []
    for index, member in enumerate(flat.members):
        gradient = member.shard.grad
        if gradient is None:
            continue  # on all ranks alike
        parts = [layout.part(index, rank) for rank in ranks]
        bounds = [(part.start, part.start + part.length) for part in parts]
        blocks[member] = PartialBlocks(member.piece.numel, bounds)
        message = torch.zeros(
            blocks[member].message_numel, dtype=torch.float64, device=gradient.device
        )
        blocks[member].write(message, gradient.detach().reshape(-1), member.part.start)
        messages.append(message)
    if not messages:
        return {}
    every = torch.cat(messages).to(flat.device)
    if flat.group.size > 1:
        flat.group.all_reduce(every, op="sum")
    rows = torch.split(every, [message.numel() for message in messages])
    return {member: one.read(row) for (member, one), row in zip(blocks.items(), rows, strict=True)}
