"""`fr-analyze`: read a folder of black boxes and say what happened.

Exit codes: 0 nothing is wrong, 1 something is, 2 the input cannot be read. Only the standard
library is imported before the arguments are known, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echelon import __version__

if TYPE_CHECKING:
    from echelon.analysis.finding import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fr-analyze` and return its exit code."""
    arguments = _parser().parse_args(argv)
    from echelon.errors import DumpFormatError

    try:
        return _run(arguments)
    except (DumpFormatError, ValueError, OSError) as err:
        from echelon.analysis.report.clean import clean

        print(f"fr-analyze: {clean(str(err))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fr-analyze",
        description="Say which rank stopped a distributed job, why, and at which line.",
        epilog="Exit code: 0 nothing is wrong, 1 a finding, 2 the input cannot be read.",
    )
    parser.add_argument(
        "path",
        metavar="DIR",
        type=Path,
        help="an incident, a dump/, a run directory, torch's dumps",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the verdict as JSON and nothing else"
    )
    parser.add_argument("--version", action="version", version=f"fr-analyze {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from echelon.analysis.diagnose import analyze

    report = analyze(arguments.path)
    _show(report, as_json=arguments.json)
    return report.exit_code


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        print(f"fr-analyze: read {report.origin}", file=sys.stderr)
        return
    from rich.console import Console

    from echelon.analysis.report.text import render_text

    render_text(report, Console(highlight=False))
