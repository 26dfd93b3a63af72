"""Control sharding manually, for schedules that split or reorder the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn

from echelon.dist.fsdp.parameters.unit import Unit, units_of
from echelon.dist.fsdp.step.driver import Driver, driver_of
from echelon.dist.fsdp.uncompiled import uncompiled_call


@contextlib.contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Set whether backward passes inside the block reduce gradients.

    If `enabled` is False, gradients of full parameters accumulate in this rank's memory. The next
    backward pass that reduces gradients includes the accumulated gradients.

    Example:
        >>> _ = fully_shard(model)
        >>> with gradient_sync(model, enabled=False):
        ...     model(tokens).mean().backward()  # adds up on this rank
        >>> model(tokens).mean().backward()  # reduces both
    """
    units = units_of(module)
    before = [unit.entry.sync for unit in units]
    for unit in units:
        unit.entry.sync = enabled
    try:
        yield
    finally:
        for unit, was in zip(units, before, strict=True):
            unit.entry.sync = was


@uncompiled_call
def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool) -> None:
    """Set whether subsequent backward passes reduce gradients; see `gradient_sync`.

    Example:
        >>> _ = fully_shard(model)
        >>> for number in range(4):
        ...     set_requires_gradient_sync(model, number == 3)
        ...     model(tokens).mean().backward()
    """
    for unit in units_of(module):
        unit.entry.sync = requires_gradient_sync


@uncompiled_call
def unshard(module: nn.Module) -> None:
    """Gather all units in a module, and hold them until `reshard` is called. Collective.

    While the units are held, `module.parameters()` returns full parameters, and backward passes
    accumulate gradients in `.grad`. After the last backward pass, call `reduce_gradients` and then
    `reshard`.

    Raises:
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> _ = fully_shard(model)
        >>> unshard(model)
        >>> model.token.weight.shape  # whole, until reshard
        torch.Size([64, 16])
        >>> reshard(model)
    """
    by_driver = _by_driver(units_of(module))
    for driver, units in by_driver.items():
        driver.gather(units)
    for driver, units in by_driver.items():
        driver.hold(units)


@uncompiled_call
def reshard(module: nn.Module) -> None:
    """Release all units in a module. A later backward pass gathers the units again.

    Example:
        >>> _ = fully_shard(model, reshard_after_forward=False)
        >>> with torch.no_grad():
        ...     _ = model(tokens)  # its parameters stay whole
        >>> reshard(model)
    """
    for driver, units in _by_driver(units_of(module)).items():
        driver.release(units)


def reshard_keeping_memory(module: nn.Module) -> None:
    """Release all units in a module, but retain their host memory for the next gather.

    Use this function in programs that gather the whole module in every step, where allocating fresh
    pages costs more than the gather itself. The memory is retained until `reshard` or a training
    step releases the units after the next gather.
    """
    flats = [flat for unit in units_of(module) for flat in unit.flats]
    for flat in flats:
        flat.keeps_memory = True
    try:
        reshard(module)
    finally:
        for flat in flats:
            flat.keeps_memory = False


@uncompiled_call
def reduce_gradients(module: nn.Module) -> None:
    """Average the gradients of the full parameters across the ranks.

    The result is added to the shards' `.grad`. A gradient that is missing on a rank counts as zero.
    Collective.

    Raises:
        CollectiveError: a rank was lost or did not join.

    Example:
        >>> _ = fully_shard(model)
        >>> unshard(model)
        >>> for _ in range(2):
        ...     model(tokens).mean().backward()  # any number of backward passes
        >>> reduce_gradients(model)
        >>> reshard(model)
    """
    trained = [unit for unit in reversed(units_of(module)) if unit.trains]
    for driver, units in _by_driver(trained).items():
        driver.reduce(units)


def _by_driver(units: Iterable[Unit]) -> dict[Driver, list[Unit]]:
    found: dict[Driver, list[Unit]] = {}
    for unit in units:
        found.setdefault(driver_of(unit), []).append(unit)
    return found
