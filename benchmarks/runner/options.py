"""Parse the options that all benchmark scripts have, and write their results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner.machine import Conditions, sentence
from benchmarks.runner.place import RESULTS
from benchmarks.runner.table import Table


def parser(doc: str | None, *, rounds: int | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have.

    Args:
        doc: the script's docstring, whose first line is shown.
        rounds: the default of `--rounds`.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds, help="how often each is measured")
    made.add_argument("--seed", type=int, help="of the order (default: another one in each run)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write table and samples there")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    made.add_argument(
        "--keep",
        metavar="PAGE/NAME",
        help="keep the result as benchmarks/results/PAGE/NAME.json; `make bench-docs` puts its "
        "table into docs/benchmarks/PAGE.md where that has a place for NAME",
    )
    return made


def resumable(doc: str | None, out: Path) -> argparse.ArgumentParser:
    """Return a parser for a resumable script, which appends a record after each unit of work.

    Args:
        doc: the script's docstring, which is shown verbatim.
        out: the default of `--out`.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing new after so long"
    )
    made.add_argument(
        "--most-load", type=float, default=float("inf"), help="begin nothing above this load"
    )
    made.add_argument("--out", type=Path, default=out, help="records, one per line")
    made.add_argument("--table", action="store_true", help="only print the table")
    return made


def _finite(value: Any) -> Any:
    """Return samples in a form that JSON supports: infinity, which marks a timeout, is None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finish(
    options: argparse.Namespace,
    conditions: Conditions,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    samples: Mapping[str, Any],
) -> None:
    """Print the table, and write it to the files that the options name.

    Args:
        options: the parsed options of `parser`.
        conditions: the conditions, created before the first measurement.
        columns: each column's title and alignment.
        rows: the rows, with one text per column.
        samples: all measurements, which are stored along with the table.
    """
    told = conditions.told()
    about = {"conditions": told, "samples": _finite(samples)}
    table = Table([title for title, _ in columns], [side for _, side in columns], rows, about)
    text = f"{table.markdown()}\n\n{sentence(told)}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        table.save(options.json)
    if options.keep:
        table.save(RESULTS / f"{options.keep}.json")
