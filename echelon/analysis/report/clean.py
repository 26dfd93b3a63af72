"""Make recorded strings safe to display.

The strings in a dump are untrusted, and can contain terminal escape sequences or markup. Control
characters, bidirectional overrides and line breaks are replaced before a string is displayed.
Markup is escaped when the string is inserted into a page.
"""

from __future__ import annotations

import re
from html import escape

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_MAX_CHARS = 2000


def clean(text: str, limit: int = _MAX_CHARS) -> str:
    """Return `text` as a single line of at most `limit` characters, without control characters."""
    shown = _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text[: limit + 1].replace("\t", " "))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def safe(text: str) -> str:
    """Clean and escape `text` for use between tags or in a quoted attribute."""
    return escape(clean(text))
