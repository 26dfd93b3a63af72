"""Assemble the live page of a job as a single HTML file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from echelon.analysis.report.page.template import part

_FOLDER = Path(__file__).parent


@cache
def page() -> str:
    """Return the page as HTML. After loading, the page requests only the job's state."""
    whole = (_FOLDER / "live.html").read_text(encoding="utf-8")
    style = part("style.css") + (_FOLDER / "live.css").read_text(encoding="utf-8")
    script = (_FOLDER / "live.js").read_text(encoding="utf-8")
    return whole.replace("{{style}}", style, 1).replace("{{script}}", script, 1)
