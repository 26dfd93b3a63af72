"""Write the tables of docs/benchmarks from the stored results: `make bench-docs`.

    python -m tools.docs.bench                # inserts each stored table into its page
    python -m tools.docs.bench --transcribe   # stores tables that were written by hand

`make check` reports stale pages.

A table stands between `<!-- NAME: benchmarks/results/PAGE/NAME.json -->` and `<!-- end of NAME -->`
in its page. The text around the table is written by hand; it explains why the table's numbers were
measured and what they show.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.runner.table import Table
from tools.docs import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results"
# Their scripts write them by themselves.
OTHERS = ("campaign", "reference_models")
_TABLE = re.compile(r"(?:^\|.*\n){2,}", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages whose tables are stored as results."""
    return [page for page in sorted(PAGES.glob("*.md")) if page.stem not in OTHERS]


def written(page: Path) -> str:
    """Return a page's text with its stored tables inserted.

    Raises:
        FileNotFoundError: the page refers to a table that is not stored.
        ValueError: a stored table is damaged.
    """
    text = page.read_text()
    tables = {}
    for name in blocks.names(text):
        kept = RESULTS / page.stem / f"{name}.json"
        tables[name] = Table.from_json(kept.read_text()).markdown()
    return blocks.replaced(text, tables)


def stale() -> list[str]:
    """Return one line for each page with a stale table, or with a table written by hand."""
    found = []
    for page in pages():
        text = page.read_text()
        if written(page) != text:
            found.append(
                f"{page.relative_to(ROOT)}: a table differs from the one that is kept in "
                "benchmarks/results: change that one, then run: make bench-docs"
            )
        if _TABLE.search(blocks.replaced(text, dict.fromkeys(blocks.names(text), ""))):
            found.append(
                f"{page.relative_to(ROOT)} has a table that is written by hand: keep it as JSON "
                "(python -m tools.docs.bench --transcribe)"
            )
    return found


def transcribe(page: Path) -> str:
    """Store a page's hand-written tables as results; return the page with markers around them."""
    text = page.read_text()
    taken = set(blocks.names(text))
    parts, done = [], 0
    for match in _TABLE.finditer(text):
        if any(start <= match.start() < end for start, end in blocks.spans(text)):
            continue
        name = _name(text[: match.start()], taken)
        taken.add(name)
        about = {"origin": f"transcribed from docs/benchmarks/{page.name}"}
        table = Table.from_markdown(match[0], about)
        table.save(RESULTS / page.stem / f"{name}.json")
        head = f"<!-- {name}: benchmarks/results/{page.stem}/{name}.json -->"
        parts += [text[done : match.start()]]
        parts += [f"{head}\n\n{table.markdown()}\n\n<!-- end of {name} -->\n"]
        done = match.end()
    return "".join(parts) + text[done:]


def _name(before: str, taken: set[str]) -> str:
    """Return an unused name for a table, derived from the heading above it."""
    headings = _HEADING.findall(_FENCED.sub("", before))
    words = re.findall(r"[a-z0-9]+", headings[-1].lower()) if headings else ["table"]
    name = "-".join(words[:6])
    numbers = (f"{name}-{number}" for number in range(2, 1000))
    return name if name not in taken else next(one for one in numbers if one not in taken)


def main() -> None:
    """Write all pages, after storing their hand-written tables if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transcribe", action="store_true", help="keep tables written by hand")
    options = parser.parse_args()
    for page in pages():
        page.write_text(transcribe(page) if options.transcribe else written(page))


if __name__ == "__main__":
    main()
