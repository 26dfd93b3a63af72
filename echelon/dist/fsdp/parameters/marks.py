"""Set and read `_echelon`, the attribute that sharding adds to the program's objects.

    a module passed to `fully_shard`          its unit
    a unit's parameter (shard or leaf)        its member
    the gradient of a shard                   True, for functions that receive only gradients

Because the mark is an attribute, `copy.deepcopy` of a model also tries to copy the unit, which
raises an error.
"""

from __future__ import annotations

from typing import Any

_NAME = "_echelon"


def attach(target: Any, value: Any) -> None:
    """Set an object's `_echelon` attribute."""
    target.__dict__[_NAME] = value  # not by setattr, which modules keep for their own parts


def attached(target: Any) -> Any:
    """Return an object's `_echelon` attribute, or None if it is not set."""
    return getattr(target, "__dict__", {}).get(_NAME)
