"""Store a table of results as JSON and show it as Markdown; the docs are made from the JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ALIGNMENTS = {"left": "---", "right": "---:", "center": ":---:", "first": ":---"}
_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Table:
    """A table with titles, alignments and rows of text.

    Attributes:
        columns: the columns' titles.
        alignments: one per column: "left", "right", "center", or "first" (explicitly left).
        rows: the rows, with one text per column.
        about: the table's origin: command, conditions, samples; or that it was transcribed.
    """

    columns: Sequence[str]
    alignments: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        """Return the table as Markdown, without a trailing newline."""
        rule = "|".join(_ALIGNMENTS[one] for one in self.alignments)
        lines = [_line(self.columns), f"|{rule}|", *map(_line, self.rows)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the table as JSON with one line per row, so that diffs are small."""
        parts = [
            f'"columns": {_dumped(list(self.columns))}',
            f'"alignments": {_dumped(list(self.alignments))}',
            '"rows": [\n' + ",\n".join(f"  {_dumped(list(row))}" for row in self.rows) + "\n ]",
        ]
        parts += [f'"{key}": {_dumped(value)}' for key, value in self.about.items()]
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Parse the output of `to_json`.

        Raises:
            ValueError: the text has another format, or a row has too few or too many cells.
        """
        found = json.loads(text)
        try:
            columns, alignments, rows = (found.pop(k) for k in ("columns", "alignments", "rows"))
        except KeyError as missing:
            raise ValueError(f"a table without {missing}") from None
        if any(len(row) != len(columns) for row in (alignments, *rows)):
            raise ValueError(f"rows of other lengths than the {len(columns)} columns")
        return cls(columns, alignments, rows, found)

    @classmethod
    def from_markdown(cls, text: str, about: Mapping[str, Any]) -> Table:
        """Parse a Markdown table.

        Raises:
            ValueError: a row has more cells than the table has columns, or the rule is unknown.
        """
        head, rule, *lines = text.strip().splitlines()
        names = {mark: name for name, mark in _ALIGNMENTS.items()}
        marks = [re.sub(r"-+", "---", cell) for cell in _cells(rule)]
        columns = _cells(head)
        rows = [_cells(line) for line in lines]
        if len(marks) != len(columns) or any(len(row) > len(columns) for row in rows):
            raise ValueError(f"rows of other lengths than the {len(columns)} columns: {head}")
        padded = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        return cls(columns, [names[mark] for mark in marks], padded, about)

    def save(self, path: Path) -> None:
        """Write the table to a file, creating its folder if necessary."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _CELLS.split(line.strip()[1:-1])]


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
