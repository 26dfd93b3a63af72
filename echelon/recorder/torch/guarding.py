"""Contain errors in the hooks: an error disables the hook and never reaches the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def quietly(run: Callable[..., _T], *args: Any) -> _T | None:
    """Return the result of `run`. If `run` raises an exception, ignore it and return None."""
    try:
        return run(*args)
    except Exception:  # noqa: BLE001 -- see above
        return None


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute with `make(original)`, or keep the original if this is not possible."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_echelon_records", False):
        return
    made = quietly(make, original)
    if made is not None:
        made._echelon_records = True
        quietly(setattr, owner, name, made)
