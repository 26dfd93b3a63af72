"""Assemble the whole model from all ranks' parts: first shards, then slices, then stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.dist import fsdp
from echelon.dist.fsdp.parameters.slices import Slice, slice_of
from echelon.dist.group import ProcessGroup
from echelon.dist.parallel.axes import Axes


def full_state_dict(model: nn.Module, axes: Axes, names: dict[str, str]) -> dict[str, Tensor]:
    """Return the whole model's `state_dict()`, in host memory on every rank. Collective.

    Args:
        model: this rank's part of the model, whose parameters are named as in the whole model.
        axes: the mesh axes over which the model is distributed.
        names: maps each parameter name in the whole model to the first name of the same parameter;
            tied parameters have several names.

    Raises:
        CollectiveError: a rank was lost or did not join.
    """
    mine = fsdp.full_state_dict(model)
    parts = {
        name: part for name, value in _variables(model) if (part := slice_of(value)) is not None
    }
    for name, part in parts.items():
        mine[name] = _joined(mine[name], part, axes.tensor)
    if axes.stages.size > 1:
        mine = _from_all_stages(mine, axes.stages)
    for name, first in names.items():
        if name not in mine and first in mine:
            mine[name] = mine[first]
    return mine


def _variables(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def _joined(value: Tensor, part: Slice, group: ProcessGroup) -> Tensor:
    parts = value.new_empty(group.size, *value.shape)
    group.all_gather(parts.view(-1), value.contiguous().view(-1))
    return torch.cat(parts.unbind(0), part.dim)


def _from_all_stages(mine: dict[str, Tensor], group: ProcessGroup) -> dict[str, Tensor]:
    """Collect the entries of all stages, broadcasting each from the first rank that has it."""
    forms = {name: [list(value.shape), str(value.dtype)] for name, value in mine.items()}
    every = group.all_gather_object(forms)
    found: dict[str, Tensor] = {}
    for root, theirs in enumerate(every):
        for name, (shape, dtype) in theirs.items():
            if name in found:
                continue
            value = mine[name] if root == group.rank else _room(shape, dtype)
            group.broadcast(value, root=root)
            found[name] = value
    return found


def _room(shape: list[int], dtype: str) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.empty(shape, dtype=kind)
