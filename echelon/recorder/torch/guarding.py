"""Guard against errors in the hooks: an error disables its hook and never reaches the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def quietly(run: Callable[..., _T], *args: Any) -> _T | None:
    """Return the result of `run`; if it raises, return None and let the program run unrecorded."""
    try:
        return run(*args)
    except Exception:  # noqa: BLE001 -- see above
        return None


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute with `make(original)`; keep the original if the owner refuses."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_echelon_records", False):
        return
    made = quietly(make, original)
    if made is not None:
        made._echelon_records = True
        quietly(setattr, owner, name, made)
