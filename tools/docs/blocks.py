"""Find and replace the generated parts of a page.

A generated part stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`. The text after the
colon is for a reader of the source; it names the command that writes the part, or its data.
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
    """Return the names of a page's generated parts, in order."""
    return [match["name"] for match in _BLOCK.finditer(page)]


def spans(page: str) -> list[tuple[int, int]]:
    """Return the start and end positions of the generated parts."""
    return [match.span() for match in _BLOCK.finditer(page)]


def replaced(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with the given parts replaced, keyed by name; other parts are unchanged.

    Raises:
        ValueError: the page does not contain a part with one of the names.
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
