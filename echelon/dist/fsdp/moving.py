"""Redistribute a sharded model in place across the ranks of a new group.

The modules, the optimizer's parameters and all hooks remain the same objects.
"""

from __future__ import annotations

from torch import nn

from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.fsdp.step import hooks
from echelon.dist.fsdp.step.driver import Driver, driver_of
from echelon.dist.fsdp.uncompiled import uncompiled_call
from echelon.dist.group import ProcessGroup


@uncompiled_call
def move(module: nn.Module, group: ProcessGroup, num_replicas: int = 1) -> None:
    """Shard a model's parameters across the ranks of another group. Collective.

    Gradients are dropped, and the shards' values become undefined. The caller must then set the
    values and the optimizer's state through `shards`. The previous group is not used, so it may
    already be unusable.

    Args:
        module: a model whose units are all sharded over one group or one mesh. A number passed as
            `reshard_after_forward` is rounded up to a divisor of the size of a replica; see
            `near_size_in`.
        group: the ranks to shard the parameters across.
        num_replicas: the number of model replicas to split the group into, a divisor of the
            group's size. The ranks of a replica are consecutive.

    Raises:
        CollectiveError: a rank was lost or did not join.
    """
    units = sorted(units_of(module), key=lambda unit: unit.number)
    before = driver_of(units[0])
    assert all(driver_of(unit) is before for unit in units), "units of several groups"
    among, replicas = _axes(group, num_replicas)
    driver = Driver(among, replicas)
    among.__dict__.setdefault("_echelon_drivers", []).append(driver)
    driver.order.budget.num_bytes = before.order.budget.num_bytes
    for unit in units:
        flat_numbers = [driver.next_flat() for _ in unit.flats]
        near_size = near_size_in(unit.near_size, among.size)
        near = driver.near(near_size) if near_size else None
        unit.move(among, replicas, near, driver.next_unit(), flat_numbers, driver.memory)
        driver.add(unit)
        hooks.follow_move(unit)
    for unit in units:
        unit.borrow_again()
        driver.measure(unit)


def _axes(group: ProcessGroup, num_replicas: int) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Return the group of this rank's replica, and the group of ranks with the same shards."""
    if num_replicas == 1:
        return group, None
    num_shards = group.size // num_replicas
    among = group.split(group.rank // num_shards, group.rank, f"{group.name}/shard")
    return among, group.split(group.rank % num_shards, group.rank, f"{group.name}/replicate")


def near_size_in(requested: int, group_size: int) -> int:
    """Return how many neighboring ranks jointly keep a unit's parameters after forward.

    The result is the smallest divisor of the group's size that is at least the requested number.
    No rank therefore keeps a larger fraction than requested.

    Returns:
        The number of ranks, or 0 if no number was requested or only the whole group is large
        enough.

    Example:
        >>> near_size_in(2, 4), near_size_in(2, 9), near_size_in(2, 5)
        (2, 3, 0)
    """
    if not requested:
        return 0
    fitting = (size for size in range(requested, group_size) if group_size % size == 0)
    return next(fitting, 0)
