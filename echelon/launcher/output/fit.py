"""Truncate lines to the width of a terminal."""

from __future__ import annotations

import re
import unicodedata

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_RESET = "\x1b[0m"


def fit(line: str, columns: int) -> str:
    """Truncate a line so that it is narrower than `columns` columns.

    Wide characters occupy two columns. Escape sequences do not occupy columns and are never split.
    If a line with escape sequences is truncated, a reset sequence is appended.
    """
    kept: list[str] = []
    used = position = 0
    while position < len(line):
        escape = _ESCAPE.match(line, position)
        if escape is not None:
            kept.append(escape[0])
            position = escape.end()
            continue
        used += _width(line[position])
        if used >= columns:
            return "".join(kept) + (_RESET if "\x1b" in line else "")
        kept.append(line[position])
        position += 1
    return line


def _width(character: str) -> int:
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") else 1
