"""Extend griffe to show the `Example:` sections of docstrings as code rather than as quotations.

Without the extension, Markdown interprets each `>>>` as three levels of quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^Example:\n(?P<body>(?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """A griffe extension that puts each `Example:` section into a fenced code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a newly loaded object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return a docstring with its `Example:` sections as fenced code blocks."""

    def fence(match: re.Match[str]) -> str:
        body = match["body"].rstrip("\n")
        return f"Example:\n    ```pycon\n{body}\n    ```\n"

    return _SECTION.sub(fence, docstring)
