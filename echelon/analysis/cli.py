"""`fr-analyze`: read a folder of black boxes and report what happened.

The exit code is 0 if nothing is wrong, 1 if a fault is found, and 2 if the input cannot be read.
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
    from echelon.analysis.evidence.picture import Picture
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
        description="Report which rank stopped a distributed job, why, and at which line.",
        epilog="Exit code: 0 nothing is wrong, 1 a finding, 2 the input cannot be read. "
        "`fr-analyze --attach [PID ...]` looks at a running job instead; see --attach --help.",
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
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page: one file, no network"
    )
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write a Chrome/Perfetto trace")
    parser.add_argument(
        "--compare",
        metavar="RUN",
        type=Path,
        help="name the first step, micro-batch, parameter and rank at which RUN and DIR diverge "
        "(fingerprints of SameBits)",
    )
    parser.add_argument("--watch", action="store_true", help="follow a running job until Ctrl-C")
    parser.add_argument("--version", action="version", version=f"fr-analyze {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.watch:
        return _watch(arguments)
    from echelon.analysis.diagnose import examine
    from echelon.analysis.report.clean import clean

    picture, report = examine(arguments.path)
    if arguments.html is not None:
        from echelon.analysis.report.page.render import write_html

        write_html(picture, report, arguments.html)
    if arguments.trace is not None:
        from echelon.analysis.report.trace import write_trace

        write_trace(picture.whole, arguments.trace)
    if arguments.json:
        _print_json(report)
    else:
        _print_text(report, picture if report.healthy else None)
        for path in (arguments.html, arguments.trace):
            if path is not None:
                print(f"  wrote {clean(str(path))}")
    return report.exit_code


def _compare(arguments: argparse.Namespace) -> int:
    if arguments.watch or arguments.html or arguments.trace or arguments.json:
        raise ValueError("--compare cannot be combined with other options")
    from echelon.analysis.compare import compare
    from echelon.analysis.report.clean import clean

    parting = compare(arguments.compare, arguments.path)
    for line in parting.text.splitlines():
        print(clean(line))
    return 0 if parting.step is None else 1


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.html is not None or arguments.trace is not None:
        raise ValueError("--watch cannot be combined with --html or --trace")
    from echelon.analysis.report.clean import clean
    from echelon.analysis.watch import watch

    def say(text: str) -> None:
        print(f"fr-analyze: {clean(text)}", file=sys.stderr)

    return watch(arguments.path, _print_json if arguments.json else _print_text, say)


def _print_json(report: Report) -> None:
    from echelon.analysis.report.clean import clean

    print(json.dumps(report.to_json(), indent=1))
    for line in (f"read {report.origin}", *report.warnings):
        print(f"fr-analyze: {clean(line)}", file=sys.stderr)


def _print_text(report: Report, picture: Picture | None = None) -> None:
    from rich.console import Console

    from echelon.analysis.evidence.timing import timing_of
    from echelon.analysis.report.text import render_text

    render_text(report, Console(highlight=False), timing_of(picture) if picture else None)
