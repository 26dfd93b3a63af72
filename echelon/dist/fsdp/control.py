"""Doing by hand what hooks do by themselves: for schedules that split or reorder the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from echelon.dist.fsdp.driver import Driver
from echelon.dist.fsdp.reducer import Reducer
from echelon.dist.fsdp.unit import State, units_of


@contextlib.contextmanager
def gradient_sync(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Whether backwards inside reduce gradients. Without it they add up on this rank alone.

    The next backward with it reduces what has added up. Gradients of whole parameters are kept in
    the meantime.
    """
    units = units_of(module)
    before = [unit.sync for unit in units]
    for unit in units:
        unit.sync = enabled
    try:
        yield
    finally:
        for unit, was in zip(units, before, strict=True):
            unit.sync = was


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool) -> None:
    """Say whether backwards reduce gradients from now on; see `gradient_sync`."""
    for unit in units_of(module):
        unit.sync = requires_gradient_sync


def unshard(module: nn.Module) -> None:
    """Gather all units in a module and hold them: nothing is released or reduced until told.

    In the meantime `module.parameters()` are whole parameters: any number of forwards and backwards
    may be run, in any order and by any calls of autograd, and gradients add up in their `.grad`.
    Then `reduce_gradients` and `reshard`. Collective.

    Raises:
        CollectiveError: a rank is lost or did not come.
    """
    units = units_of(module)
    for unit in units:
        if unit.state is State.WHOLE and unit.is_stale():
            unit.release()
        unit.driver.start_gather(unit)
    for unit in units:
        unit.wait()
        unit.held = True


def reshard(module: nn.Module) -> None:
    """Release all units in a module. What a backward still needs is gathered again for it."""
    for unit in units_of(module):
        unit.held = False
        unit.release()


def reduce_gradients(module: nn.Module) -> None:
    """Average the gradients that lie in whole parameters' `.grad` over the ranks.

    The result is added to the shards' `.grad`. All units of the module take part, with zeros where
    a rank has no gradient. Collective.

    Raises:
        CollectiveError: a rank is lost or did not come.
    """
    reducers: dict[Driver, Reducer] = {}
    for unit in reversed(units_of(module)):
        if unit.trains:
            reducers.setdefault(unit.driver, Reducer(unit.driver)).start(unit)
    for reducer in reducers.values():
        reducer.finish()
