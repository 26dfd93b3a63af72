"""Define the result of one check of `echelon doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `ok` is False if the check found a problem."""

    name: str
    text: str
    ok: bool = True
