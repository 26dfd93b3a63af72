"""`_echelon`: the only attribute that sharding sets on the program's objects.

    a module passed to `fully_shard`          its unit
    a parameter of a unit, shard or leaf      its member
    the gradient of a shard                   True, for functions that see only gradients

It is an attribute and not a separate table, so that `copy.deepcopy` of a model follows it to the
unit, which refuses to be copied; with a table, the copy would share the original's memory.
"""

from __future__ import annotations

from typing import Any

_NAME = "_echelon"


def attach(target: Any, value: Any) -> None:
    """Set the attribute."""
    target.__dict__[_NAME] = value  # not by setattr, which modules keep for their own parts


def attached(target: Any) -> Any:
    """Return the attribute, or None if there is none."""
    return getattr(target, "__dict__", {}).get(_NAME)
