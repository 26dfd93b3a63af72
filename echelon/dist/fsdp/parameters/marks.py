"""The one attribute that sharding sets on objects of the program: `_echelon`.

    a module that `fully_shard` took          its unit
    a parameter of a unit, shard or leaf      its member
    the gradient of a shard                   True, for functions that see gradients only

An attribute and not a table beside: `copy.deepcopy` of a model follows it, reaches the unit, and is
refused there; a table would let it make a copy that shares the original's memory.
"""

from __future__ import annotations

from typing import Any

_NAME = "_echelon"


def attach(target: Any, value: Any) -> None:
    """Set the attribute."""
    target.__dict__[_NAME] = value  # not by setattr, which modules keep for their own parts


def attached(target: Any) -> Any:
    """Return the attribute; None if there is none."""
    return getattr(target, "__dict__", {}).get(_NAME)
