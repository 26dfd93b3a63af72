"""Find the links of a Markdown page, and the anchors to which links may point."""

from __future__ import annotations

import re
from collections.abc import Iterator

# [text](target#anchor) with a relative target; also pictures.
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>(?![a-z]+:)[^)#\s]+)(?P<anchor>#[^)\s]+)?\)")
ANCHOR_LINK = re.compile(r"\[[^\]]*\]\(#(?P<anchor>[^)\s]+)\)")
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_HEADING = re.compile(r"^#{1,6}\s+(?P<title>.*?)\s*#*$", re.MULTILINE)


def split_fences(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, each with True if the part is a fenced code block."""
    part: list[str] = []
    fence = ""
    for line in markdown.splitlines(keepends=True):
        match = _FENCE.match(line)
        if match is None or (fence and not match[1].startswith(fence)):
            part.append(line)
            continue
        if fence:
            part.append(line)
            yield "".join(part), True
            part, fence = [], ""
        else:
            yield "".join(part), False
            part, fence = [line], match[1]
    yield "".join(part), bool(fence)


def prose(markdown: str) -> str:
    """Return a page without its fenced code blocks."""
    return "".join(part for part, is_code in split_fences(markdown) if not is_code)


def anchors(markdown: str) -> set[str]:
    """Return the anchors that the site and GitHub generate for a page's headings."""
    found: set[str] = set()
    for match in _HEADING.finditer(prose(markdown)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["title"])
        words = re.sub(r"[^\w\s-]", "", title.replace("`", "").lower()).strip()
        found.add(re.sub(r"[-\s]+", "-", words))  # the site
        found.add(words.replace(" ", "-"))  # GitHub
    return found
