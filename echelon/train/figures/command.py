"""Implement `echelon plot RUN...`, which overlays the figures of several runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon import __version__
from echelon.train.figures.file import read_figures
from echelon.train.figures.series import Run

_FORMATS = (".png", ".svg", ".pdf", ".html")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 on success, or 2 if an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="echelon plot",
        description="Draw the figures of runs: loss, gradient norm, learning rate, speed, time of "
        "an iteration, memory and waits. Needs matplotlib.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"echelon {__version__}")
    add("runs", nargs="+", metavar="RUN", help="a metrics log, or a folder with figures.jsonl; "
        "NAME=PATH names it")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help=f"{', '.join(_FORMATS)} (beside the first log)")
    add("--title", default="", help="above the picture")
    args = parser.parse_args(argv)
    try:
        runs = [_read(text) for text in args.runs]
        out = args.out or runs[0].path.with_suffix(".png")
        if out.suffix.lower() not in _FORMATS:
            raise ValueError(f"--out {out}: the name must end in one of {', '.join(_FORMATS)}")
        from echelon.train.figures.plot import plot

        plot(runs, out, title=args.title)
    except ImportError as err:
        parser.error(str(err))
    except OSError as err:
        parser.error(f"{err.filename}: {err.strerror}" if err.filename else str(err))
    except ValueError as err:
        parser.error(str(err))
    print(out)
    return 0


def _read(text: str) -> Run:
    """Read the run given as `PATH` or `NAME=PATH`."""
    name, equals, rest = text.partition("=")
    if not equals or Path(text).exists():
        name, rest = "", text
    path = Path(rest)
    if path.is_dir():
        path /= "figures.jsonl"
    lines = read_figures(path)
    if not lines:
        raise ValueError(f"{path} is empty")
    usual = path.parent.name if path.name == "figures.jsonl" else path.stem
    return Run(name or usual, path, lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
