"""One line of `echelon doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `ok` False means that something will not work as it should."""

    name: str
    text: str
    ok: bool = True
