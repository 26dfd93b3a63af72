"""One line of `echelon doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `ok` is False if something will not work as it should."""

    name: str
    text: str
    ok: bool = True
