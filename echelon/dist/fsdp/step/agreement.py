"""Compare a new unit's settings across ranks, and agree on which units exist.

The units' settings determine the order of collectives and must therefore be equal on all ranks. A
unit counts as existing until all ranks have deleted it, because the garbage collector runs at
different times on different ranks.
"""

from __future__ import annotations

from typing import Any

from echelon.dist.fsdp.step.driver import Driver
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.absent import is_absent


def check_settings(driver: Driver, title: str, settings: dict[str, Any]) -> None:
    """Check that all ranks create the next unit with the same settings. Collective.

    Args:
        driver: the unit's driver.
        title: the name of the unit's module, for error messages.
        settings: plain values, keyed by the names of `fully_shard`'s arguments.

    Raises:
        ValueError: a setting differs, or the ranks call `fully_shard` on different modules.
        CollectiveError: a rank was lost or did not join.
    """
    settings = {"module": title, **settings}
    living = set(driver.units)
    for group in (driver.group, driver.replicas):
        if group is None or group.size == 1 or is_absent(group):
            continue
        rows = group.all_gather_object({"settings": settings, "units": sorted(living)})
        for name in settings:
            _check_equal(group, title, name, [row["settings"].get(name) for row in rows])
        living.update(*(row["units"] for row in rows))
    driver.keep_sizes(living & driver.sizes.keys())


def _check_equal(group: ProcessGroup, title: str, name: str, values: list[Any]) -> None:
    if all(value == values[0] for value in values):
        return
    found: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        found.setdefault(repr(value), []).append(rank)
    text = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in found.items())
    raise ValueError(
        f"fully_shard({title}): {name} must be equal on all ranks of group {group.name!r}, "
        f"but is {text}"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
