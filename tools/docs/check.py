"""Check that everything the documentation cites exists: links, paths, names, options, notes.

    python -m tools.docs.check        # prints one line per fault; the exit code is 1 if any

The check does not execute anything that the pages show and does not need a network, so `make check`
includes it. `citations.py` defines which citations are recognized. Links are checked in every
Markdown file of the repository. Pages with generated parts must match the output of their scripts.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path, PurePosixPath

from tools.docs import bench, citations, incident, reference
from tools.docs.links import ANCHOR_LINK, LINK, anchors, prose

ROOT = Path(__file__).resolve().parents[2]
_UNCHECKED = ("tests/data/",)  # recorded output


def main() -> int:
    """Check every page; return the exit code."""
    files = tracked_files(ROOT)
    facts = citations.Facts.collect(ROOT, files)
    faults = citations.missing_notes(ROOT, files)
    for page in sorted(f for f in files if f.endswith(".md") and not f.startswith(_UNCHECKED)):
        text = (ROOT / page).read_text()
        faults += [f"{page}: {fault}" for fault in broken_links(ROOT, page, text, files)]
        if page != "CHANGELOG.md":  # describes earlier versions
            faults += [f"{page}: {fault}" for fault in citations.missing(text, facts)]
    faults += stale_pages()
    print("\n".join(faults) if faults else f"docs: {len(files)} files, nothing cited is missing")
    return 1 if faults else 0


def stale_pages() -> list[str]:
    """Return one line for each page whose generated parts differ from the scripts' output."""
    found = bench.stale()
    page = incident.PAGE.read_text()
    if incident.written(page) != page:
        found.append(f"{incident.PAGE.name} is stale; run: python -m tools.docs.incident write")
    return found


def tracked_files(root: Path) -> frozenset[str]:
    """Return the existing files of the repository, except the files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return frozenset(f for f in listed.splitlines() if (root / f).is_file())


def broken_links(root: Path, page: str, text: str, files: frozenset[str]) -> list[str]:
    """Return one line for each relative link on a page whose target does not exist."""
    faults = [
        f"no heading #{match['anchor']}"
        for match in ANCHOR_LINK.finditer(prose(text))
        if match["anchor"] not in anchors(text)
    ]
    for match in LINK.finditer(prose(text)):
        path = normal(PurePosixPath(page).parent / match["target"])
        if path in generated():
            continue
        if path not in files and not any(f.startswith(f"{path}/") for f in files):
            faults.append(f"no file {match['target']}")
        elif match["anchor"] and path.endswith(".md"):
            anchor = match["anchor"]
            if anchor[1:] not in anchors((root / path).read_text()):
                faults.append(f"no heading {match['target']}{anchor}")
    return faults


def normal(path: PurePosixPath) -> str:
    """Return a path with all `..` components resolved."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


@functools.cache
def generated() -> frozenset[str]:
    """Return the pages of docs/ that exist only on the site."""
    return frozenset(f"docs/{page}" for page in reference.generated_pages(ROOT))


if __name__ == "__main__":
    sys.exit(main())
