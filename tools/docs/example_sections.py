"""A griffe extension: the `Example:` sections of docstrings are shown as sessions, not as quotes.

Without it Markdown takes each `>>>` for three levels of quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^Example:\n(?P<body>(?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Puts each Example into a fence of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return a docstring whose Examples are fenced code."""

    def fence(match: re.Match[str]) -> str:
        body = match["body"].rstrip("\n")
        return f"Example:\n    ```pycon\n{body}\n    ```\n"

    return _SECTION.sub(fence, docstring)
