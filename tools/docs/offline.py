"""Check that a built site loads nothing from other hosts: `offline.py build/site`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

# Resources that a browser fetches by itself, unlike the target of an <a>.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|@import\s+(?:url\()?["']?((?:https?:)?//[^"')]+)|url\(["']?((?:https?:)?//[^"')]+)"""
)


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return one line for each resource that a page or style sheet loads from another host."""
    return [
        f"{path.relative_to(site)} loads {next(filter(None, match.groups()))}"
        for path in sorted(site.rglob("*"))
        if path.suffix in (".html", ".css")
        for match in _LOADED.finditer(path.read_text())
    ]


def main() -> int:
    """Check the site in the folder given on the command line; return the exit code."""
    faults = loaded_from_elsewhere(Path(sys.argv[1]))
    print("\n".join(faults) or "site: nothing is loaded from elsewhere")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
