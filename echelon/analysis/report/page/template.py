"""Assemble the page from its HTML template, style sheet and script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_PLACE = re.compile(r"\{\{(\w+)\}\}")


@cache
def part(name: str) -> str:
    """Return the text of a file in this module's folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def fill(parts: Mapping[str, str]) -> str:
    """Replace the `{{name}}` placeholders in `page.html`.

    Raises:
        KeyError: the page has a placeholder that is not in `parts`.
    """
    whole = {"style": part("style.css"), "script": part("script.js"), **parts}
    return _PLACE.sub(lambda place: whole[place[1]], part("page.html"))
