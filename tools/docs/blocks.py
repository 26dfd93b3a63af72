"""Parts of a page that a script writes: between `<!-- NAME: ... -->` and `<!-- end of NAME -->`.

The words after the colon tell a reader of the source which command writes the part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_BLOCK = re.compile(
    r"(?P<head><!-- (?P<name>[\w.-]+): [^\n]*-->\n)(?P<body>.*?)"
    r"(?P<tail><!-- end of (?P=name) -->)",
    re.DOTALL,
)


def names(page: str) -> list[str]:
    """Return the names of a page's written parts, in order."""
    return [match["name"] for match in _BLOCK.finditer(page)]


def spans(page: str) -> list[tuple[int, int]]:
    """Return where the written parts begin and end."""
    return [match.span() for match in _BLOCK.finditer(page)]


def replaced(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with the given parts in their places; parts of other names stay.

    Raises:
        ValueError: the page has no place for a part.
    """
    missing = sorted(set(parts) - set(names(page)))
    if missing:
        raise ValueError(f"the page has no <!-- {missing[0]}: ... --> for a part that is written")

    def put(match: re.Match[str]) -> str:
        part = parts.get(match["name"])
        if part is None:
            return match[0]
        return f"{match['head']}\n{part.strip()}\n\n{match['tail']}"

    return _BLOCK.sub(put, page)
