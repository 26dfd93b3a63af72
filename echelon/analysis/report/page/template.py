"""The page's own files: its frame, its look and its script, put together as one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_PLACE = re.compile(r"\{\{(\w+)\}\}")


@cache
def part(name: str) -> str:
    """Read a file that lies beside this module and is installed with it."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def fill(parts: Mapping[str, str]) -> str:
    """Put markup into the places of `page.html`, each named `{{so}}`.

    What is put in is not searched for places again: recorded text may look like one.

    Raises:
        KeyError: the page has a place for which `parts` has nothing.
    """
    whole = {"style": part("style.css"), "script": part("script.js"), **parts}
    return _PLACE.sub(lambda place: whole[place[1]], part("page.html"))
