"""Keep errors in the hooks from reaching the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def quietly(run: Callable[..., _T], *args: Any) -> _T | None:
    """Return the result of `run`, or None if `run` raises an exception."""
    try:
        return run(*args)
    except Exception:  # noqa: BLE001 -- see above
        return None


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute with `make(original)`, unless it is missing or already replaced."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_echelon_records", False):
        return
    made = quietly(make, original)
    if made is not None:
        made._echelon_records = True
        quietly(setattr, owner, name, made)
