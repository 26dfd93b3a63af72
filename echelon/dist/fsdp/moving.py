"""Redistribute a sharded model in place, among the ranks of a new group.

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
def move(module: nn.Module, group: ProcessGroup) -> None:
    """Divide a model's parameters among the ranks of another group. Collective.

    Gradients are dropped, and the shards' values become undefined. The caller must set the values
    and the optimizer's state through `shards`. The previous group may be broken.

    Args:
        module: a model sharded over one group, without replicas and with a boolean
            `reshard_after_forward`.
        group: the ranks to divide the parameters among.

    Raises:
        CollectiveError: a rank was lost or did not join.
    """
    units = sorted(units_of(module), key=lambda unit: unit.number)
    before = driver_of(units[0])
    assert all(driver_of(unit) is before for unit in units), "units of several groups"
    driver = Driver(group, None)
    group.__dict__.setdefault("_echelon_drivers", []).append(driver)
    driver.order.budget.num_bytes = before.order.budget.num_bytes
    for unit in units:
        flat_numbers = [driver.next_flat() for _ in unit.flats]
        unit.move(group, driver.next_unit(), flat_numbers, driver.memory)
        driver.add(unit)
        hooks.follow_move(unit)
    for unit in units:
        unit.borrow_again()
        driver.measure(unit)
