"""Turn modules into units whose parameters are sharded across ranks (`fully_shard`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.dist.fsdp import states
from echelon.dist.fsdp.guards import optimizers, torch_calls
from echelon.dist.fsdp.parameters import meta
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.marks import attach
from echelon.dist.fsdp.parameters.member import NO_HOOKS, Source, member_of
from echelon.dist.fsdp.parameters.unit import Unit, owner_of, unit_of
from echelon.dist.fsdp.settings import CPUOffloadPolicy, MixedPrecisionPolicy
from echelon.dist.fsdp.step import agreement, hooks
from echelon.dist.fsdp.step.driver import Driver
from echelon.dist.fsdp.uncompiled import uncompiled_call
from echelon.dist.group import ProcessGroup
from echelon.dist.mesh import DeviceMesh
from echelon.dist.runtime import world

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


@uncompiled_call
def fully_shard(
    module: M,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    *,
    ignored_params: Iterable[nn.Parameter] | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    prefetch: int = 2,
    memory_budget_bytes: int | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> M:
    """Shard a module's parameters across ranks, and gather them while the module computes.

    Call this function on the blocks first and on the whole model last. Each call combines all of
    the module's parameters that do not yet belong to a unit into one new unit. Every rank of the
    group must make the same calls in the same order, and each call blocks until all ranks have
    joined. All ranks receive the parameter values of group rank 0. Deleting the model frees its
    shards, hooks and memory. In a process that replaces a lost rank, the calls return immediately
    and the values arrive later; see `dist.init`.

    Args:
        module: a module, or several modules that form one unit and run one after the other.
        group: the ranks to shard parameters across; None means the world.
        mesh: an alternative to `group`, with one axis (shard) or two (replicate, shard). Parameters
            are sharded along the shard axis and copied along the replicate axis.
        reshard_after_forward: True releases the parameters after forward and gathers them again for
            backward. False keeps the parameters. A number k that divides the group size makes each
            rank keep 1/k of the parameters, and k neighboring ranks gather them for backward. The
            outermost module keeps its parameters if a backward pass follows.
        mp_policy: the dtypes of computation and communication.
        ignored_params: parameters that are not sharded. The caller must keep them equal on all
            ranks.
        offload_policy: a policy for keeping shards in host memory. If the parameters are already in
            host memory, the policy has no effect, and a warning is issued.
        prefetch: how many units to gather ahead of time while this unit computes.
        memory_budget_bytes: how much memory all units of the group together may use on a rank,
            beyond the memory of the unit being computed. One third is for units gathered ahead, one
            third for gradients being reduced, and one third for idle memory. One unit ahead and one
            reduction are always allowed. The last value other than None applies to the whole
            group. If all calls pass None, the budget is six times the size of the largest unit that
            contains no other unit, or more if `prefetch` is above 2.
        device: where to allocate parameters that are on the meta device; None means the CPU.
        init: a function that is called with each module whose meta parameters or buffers have been
            allocated, after the module's `reset_parameters()` if it has one. None means that only
            `reset_parameters()` is called.

    Returns:
        The module itself.

    Raises:
        ValueError: an argument is invalid, settings differ between ranks, or a module is already
            sharded.
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> for block in model.blocks:
        ...     _ = fully_shard(block)
        >>> _ = fully_shard(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(tokens).mean().backward()
        >>> optimizer.step()
    """
    modules = _modules(module)
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be a number of units >= 0, got {prefetch!r}")
    _check_budget(memory_budget_bytes)
    driver = _driver(group, mesh)
    near_size = _check_reshard(reshard_after_forward, driver.group)
    precision = mp_policy or MixedPrecisionPolicy()
    if not isinstance(precision, MixedPrecisionPolicy):
        raise ValueError(f"mp_policy must be a MixedPrecisionPolicy or None, got {precision!r}")
    if offload_policy is not None and not isinstance(offload_policy, CPUOffloadPolicy):
        raise ValueError(
            f"offload_policy must be a CPUOffloadPolicy or None, got {offload_policy!r}"
        )
    skipped = _ignored(ignored_params)
    agreement.check_settings(
        driver,
        type(modules[0]).__name__,
        {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": repr(precision),
            "offload_policy": repr(offload_policy),
            "prefetch": prefetch,
            "memory_budget_bytes": memory_budget_bytes,
        },
    )
    meta.make_real(_parts(modules), skipped, device, init)
    sources, borrowed = _sources(modules, skipped)
    if offload_policy and all(source.parameter.device.type == "cpu" for source in sources):
        warnings.warn("offload_policy has no effect on a model on the CPU", stacklevel=2)
    unit = Unit(
        modules,
        [_flat(part, driver, precision, offload_policy) for part in _alike(sources)],
        driver.next_unit(),
        precision,
        reshard=reshard_after_forward is not False,
        near=driver.near(near_size) if near_size else None,
        near_size=near_size,
        depth=prefetch,
    )
    driver.prepare(unit.device)
    driver.add(unit)
    unit.borrow(borrowed)
    _name(unit, modules)
    if memory_budget_bytes is not None:
        driver.order.budget.num_bytes = memory_budget_bytes
    driver.measure(unit)
    hooks.install(unit, modules)
    states.install(unit, modules)
    optimizers.install()
    torch_calls.install()
    driver.memory.pages.trim()
    return module


def _modules(given: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    if not isinstance(given, nn.Module | list | tuple):
        raise ValueError(f"fully_shard takes modules, got {type(given).__name__}")
    modules = (given,) if isinstance(given, nn.Module) else tuple(given)
    if not modules:
        raise ValueError("fully_shard needs at least one module")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"fully_shard takes modules, got {type(module).__name__}")
        if unit_of(module) is not None:
            raise ValueError(f"this {type(module).__name__} is already sharded")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"a {type(module).__name__} has no forward of its own; shard the modules inside it"
            )
    return modules


def _ignored(parameters: Iterable[nn.Parameter] | None) -> set[int]:
    given = () if parameters is None else parameters
    one = given if isinstance(given, str | torch.Tensor) else None
    listed = [] if one is not None else list(given)
    if one is not None or not all(isinstance(each, nn.Parameter) for each in listed):
        raise ValueError("ignored_params must be parameters, for example from module.parameters()")
    return {id(parameter) for parameter in listed}


def _check_budget(num_bytes: int | None) -> None:
    if num_bytes is None:
        return
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise ValueError(
            f"memory_budget_bytes must be a number of bytes >= 0 or None, got {num_bytes!r}"
        )


def _driver(group: ProcessGroup | None, mesh: DeviceMesh | None) -> Driver:
    replicas = None
    if mesh is not None:
        group, replicas = _groups_of(group, mesh)
    group = world() if group is None else group
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group must be a ProcessGroup or None, got {group!r}; pass a mesh as mesh="
        )
    # Kept on the group: both live equally long.
    drivers: list[Driver] = group.__dict__.setdefault("_echelon_drivers", [])
    for driver in drivers:
        if driver.replicas is replicas:
            return driver
    drivers.append(Driver(group, replicas))
    return drivers[-1]


def _groups_of(
    group: ProcessGroup | None, mesh: DeviceMesh
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Return a mesh's sharding group and its replication group, which is None without replicas."""
    if group is not None:
        raise ValueError("group= and mesh= are mutually exclusive")
    if not isinstance(mesh, DeviceMesh) or len(mesh.names) not in (1, 2):
        raise ValueError(
            f"mesh must be a DeviceMesh with one axis or with two (replicate, shard), got {mesh!r}"
        )
    shards = mesh.group(mesh.names[-1])
    replicas = mesh.group(mesh.names[0]) if len(mesh.names) == 2 else None
    return shards, replicas if replicas is not None and replicas.size > 1 else None


def _check_reshard(reshard: bool | int, group: ProcessGroup) -> int:
    """Check `reshard_after_forward`; return it, or 0 if it is a bool or the group size."""
    if isinstance(reshard, bool):
        return 0
    if not isinstance(reshard, int) or reshard < 1 or group.size % reshard:
        raise ValueError(
            "reshard_after_forward must be a bool or an integer that divides the group's size "
            f"({group.size}), got {reshard!r}"
        )
    return 0 if reshard == group.size else reshard


def _sources(modules: tuple[nn.Module, ...], ignored: set[int]) -> tuple[list[Source], list[Unit]]:
    """Return the parameters that are in no unit yet, and the units that own the others."""
    sources: dict[int, Source] = {}
    within = {module for _, module in _parts(modules)}
    borrowed: dict[Unit, None] = {}
    sharded = {part for top in within if unit_of(top) is not None for part in top.modules()}
    for path, module in _parts(modules):
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            member = member_of(parameter)
            if member is None:
                title = f"{path}.{name}" if path else name
                _check_parameter(title, parameter, is_sparse=getattr(module, "sparse", False))
                source = sources.setdefault(id(parameter), Source(parameter, title))
                source.slots.append((module, name))
            elif not any(part is module and key == name for part, key in member.slots):
                member.add_slot(module, name)
                borrowed[owner_of(member)] = None
            elif module not in sharded:
                raise ValueError(
                    f"{name!r} of this {type(modules[0]).__name__} already belongs to "
                    f"{owner_of(member)}: shard the blocks first and the module around them last"
                )
    return list(sources.values()), list(borrowed)


def _check_parameter(title: str, parameter: nn.Parameter, *, is_sparse: bool) -> None:
    if is_sparse is True:
        raise ValueError(
            f"parameter {title!r} has sparse gradients (sparse=True), but shards are reduced as "
            "dense vectors: use sparse=False, or pass the parameter to ignored_params="
        )
    if parameter._backward_hooks:
        raise ValueError(f"parameter {title!r} {NO_HOOKS}")
    if parameter.is_complex():
        raise ValueError(
            f"parameter {title!r} is {parameter.dtype}, which cannot be reduced; pass it to "
            "ignored_params=, or store the real and imaginary parts (torch.view_as_real)"
        )


def _parts(modules: tuple[nn.Module, ...]) -> list[tuple[str, nn.Module]]:
    found: dict[nn.Module, str] = {}
    for top in modules:
        for path, module in top.named_modules():
            found.setdefault(module, path)
    return [(path, module) for module, path in found.items()]


def _alike(sources: list[Source]) -> list[list[Source]]:
    """Group parameters by dtype, device and `requires_grad`."""
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        parameter = source.parameter
        key = (parameter.dtype, parameter.device, parameter.requires_grad)
        groups.setdefault(key, []).append(source)
    return list(groups.values())


def _flat(
    sources: list[Source],
    driver: Driver,
    precision: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
) -> Flat:
    casts = sources[0].parameter.is_floating_point()
    return Flat(
        sources,
        driver.group,
        driver.next_flat(),
        precision.param_dtype if casts else None,
        precision.reduce_dtype if casts else None,
        offload,
        driver.replicas,
        driver.memory,
    )


def _name(unit: Unit, modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        attach(module, unit)
        for path, part in module.named_modules():
            inner = unit_of(part)
            if inner is not None and inner is not unit:
                inner.entry.name = path
                unit.entry.outer = True
