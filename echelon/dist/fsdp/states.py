"""Get and set the state of a sharded model, as this rank's shards or as full tensors.

`model.state_dict()` returns the shards without communication, and `model.load_state_dict` accepts
shards or full parameters. `shards` describes the position of each shard in its parameter.
`full_state_dict` assembles the full model, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.parameters.flat import Flat, make_whole
from echelon.dist.fsdp.parameters.layout import tagged_shape
from echelon.dist.fsdp.parameters.member import Member, member_of
from echelon.dist.fsdp.parameters.unit import Unit, owner_of, units_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.fsdp.uncompiled import uncompiled_call


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This rank's shard of one parameter.

    Attributes:
        name: the parameter's name in the model; the first name of a tied parameter.
        aliases: the other names of a tied parameter.
        shape: the full parameter's shape.
        dtype: the dtype of the parameter and of its shards.
        start: the index of this rank's first element in the flattened parameter.
        length: the number of elements on this rank, which can be 0.
        data: [length], a view of the shard's memory; writing to it changes the model.
        parameter: the parameter that the optimizer uses, `[length, 1, ...]`.
        ranks: the global ranks across which the parameter is sharded, in order.
        copies: the global ranks that hold this shard, including this rank. To avoid duplicates, the
            first of these ranks should save the shard.

    Example:
        >>> shard = shards(fully_shard(model))["token.weight"]
        >>> shard.length == shard.data.numel()  # all elements on one rank, half on each of two
        True
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    length: int
    data: torch.Tensor
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    copies: tuple[int, ...]


def shards(module: nn.Module) -> dict[str, Shard]:
    """Return this rank's shard of each sharded parameter in a module, keyed by parameter name.

    Unsharded parameters are not included. Not collective.

    Example:
        >>> _ = fully_shard(model)
        >>> for name, shard in shards(model).items():
        ...     assert shard.start + shard.length <= math.prod(shard.shape)
    """
    names: dict[Member, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        member = member_of(parameter)
        if member is not None:
            names.setdefault(member, []).append(name)
    return {found[0]: _shard(member, found) for member, found in names.items()}


def _shard(member: Member, names: list[str]) -> Shard:
    flat, part = member.flat, member.part
    member.adopt()
    group, replicas = flat.group, flat.replicas
    mine = (group.ranks[group.rank],)
    return Shard(
        name=names[0],
        aliases=tuple(names[1:]),
        shape=member.piece.shape,
        dtype=flat.dtype,
        start=part.start,
        length=part.length,
        data=flat.chunk[part.offset : part.offset + part.length],
        parameter=member.shard,
        ranks=group.ranks,
        copies=mine if replicas is None else replicas.ranks,
    )


def optimizer_state(optimizer: torch.optim.Optimizer, shard: Shard) -> dict[str, Any]:
    """Return an optimizer's state for one shard.

    Tensors with the shard's shape are returned as views of shape [length]. Other values, such as
    step counts, are returned unchanged.

    Example:
        >>> _ = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(tokens).mean().backward()
        >>> optimizer.step()
        >>> shard = shards(model)["token.weight"]
        >>> optimizer_state(optimizer, shard)["exp_avg"].shape == (shard.length,)
        True
    """
    state = optimizer.state.get(shard.parameter, {})
    return {key: value.view(-1) if is_part(value, shard) else value for key, value in state.items()}


def is_part(value: Any, shard: Shard) -> bool:
    """Return whether a value in an optimizer's state is sharded, i.e. has the shard's shape.

    Example:
        >>> _ = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loss_fn(model(tokens), targets).backward()
        >>> optimizer.step()
        >>> shard = shards(model)["token.weight"]
        >>> state = optimizer.state[shard.parameter]
        >>> {name: is_part(value, shard) for name, value in state.items()}
        {'step': False, 'exp_avg': True, 'exp_avg_sq': True}
    """
    return (
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shard.parameter.shape
    )


@uncompiled_call
def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """Return the full model's state in host memory, like the unsharded model's `state_dict()`.

    Units are gathered one at a time. Collective.

    Args:
        rank0_only: whether to return the state only on ranks that are rank 0 of every unit's
            group, and an empty dict on all other ranks.

    Raises:
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> fully_shard(model)(tokens).sum().backward()
        >>> weights = full_state_dict(model, rank0_only=True)
        >>> if dist.world().rank == 0:
        ...     torch.save(weights, "model.pt")
    """
    whole: dict[Member, torch.Tensor] = {}
    for unit in units_of(module):
        for flat in unit.flats:
            whole.update(_gather(flat, rank0_only))
    everywhere = all(driver_of(unit).group.rank == 0 for unit in units_of(module))
    if rank0_only and not everywhere:
        return {}
    result: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        member = member_of(value)
        result[name] = value.detach().cpu().clone() if member is None else whole[member]
    return result


def _gather(flat: Flat, rank0_only: bool) -> dict[Member, torch.Tensor]:
    group = flat.group
    flat.adopt()
    chunk = flat.chunk.to(flat.device)
    wanted = group.rank == 0 or not rank0_only
    buffer = make_whole(flat) if wanted else None
    tagged = chunk.view(tagged_shape(chunk.numel(), flat.number))
    if group.size == 1:
        assert buffer is not None
        buffer.copy_(chunk)
    elif rank0_only:
        group.gather(buffer, tagged, root=0)
    else:
        assert buffer is not None
        group.all_gather(buffer, tagged)
    if buffer is None:
        return {}
    return {member: member.within(buffer).detach().cpu().clone() for member in flat.members}


def install(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Install hooks that make the modules' `state_dict` and `load_state_dict` handle shards."""

    def before_save(*_: Any) -> None:
        _show_shards(unit)

    def before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        _before_load(unit, module, state, prefix, metadata)

    for module in modules:
        hookable: Any = module  # torch leaves these two without types
        hookable.register_state_dict_pre_hook(before_save)
        hookable.register_load_state_dict_pre_hook(before_load)


def _show_shards(unit: Unit) -> None:
    if unit.entry.held:
        raise ValueError(
            f"{unit} is unsharded: call reshard() before reading or setting the unit's state"
        )
    driver = driver_of(unit)
    if driver.is_at_work(unit):
        raise RuntimeError(
            f"the state of {unit} was read or set during a forward or backward pass, which needs "
            "the full parameters: read or set the state between steps"
        )
    unit.adopt()
    driver.release([unit])


def _before_load(
    unit: Unit, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Replace full parameters in a state dict with this rank's shards."""
    _show_shards(unit)
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace the shards with other "
            "parameters: use assign=False"
        )
    for name, member in _named(module, unit):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.shape == member.piece.shape:
            part = member.part
            mine = value.detach().reshape(-1)[part.start : part.start + part.length]
            state[prefix + name] = mine.view(member.shard.shape)


def _named(module: nn.Module, unit: Unit) -> Iterator[tuple[str, Member]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        member = member_of(parameter)
        if member is not None and owner_of(member) in (unit, *unit.borrowed):
            yield name, member
