"""Create pictures of a terminal and of a report from real output: `make pictures`.

    python -m tools.docs.pictures    # the terminal; also the report, if Chromium is installed

The commands run on an incident in the repository, so readers can reproduce the pictures. Terminals
are dark on every page, because they use the colors of the output.
"""

from __future__ import annotations

import itertools
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.color import Color
from rich.console import Console
from rich.text import Text

from tools.docs.incident import INCIDENT

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
COMMAND = ("fr-analyze", str(INCIDENT.relative_to(ROOT)))
_COLUMNS = 96
_CHAR, _LINE, _MARGIN = 8.05, 18.5, 16.0  # of a monospace font of 13.4 px
_FONT = "13.4px ui-monospace, 'DejaVu Sans Mono', monospace"
_GROUND, _TEXT, _DIM = "#15181e", "#d8dee9", "#8b93a1"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def on_a_terminal(command: tuple[str, ...]) -> str:
    """Return a command's output on a terminal, including its colors.

    Raises:
        ChildProcessError: the command was ended by a signal.
    """
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(_COLUMNS), "LINES": "60"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    os.close(ours)
    if process.returncode < 0:
        raise ChildProcessError(f"{' '.join(command)} was ended by signal {-process.returncode}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how a terminal says that its last writer has closed it
        return b""


def terminal(title: str, output: str) -> str:
    """Return an SVG image of a terminal that shows a command and its output."""
    lines = [Text(f"$ {title}", style="bold"), *map(Text.from_ansi, output.rstrip().splitlines())]
    width = 2 * _MARGIN + _COLUMNS * _CHAR
    height = 2 * _MARGIN + len(lines) * _LINE
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    label = f'role="img" aria-label="{escape(title)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>',
        f"<style>text {{ font: {_FONT}; white-space: pre; }}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{_GROUND}"/>',
    ]
    for number, line in enumerate(lines):
        parts += _spans(line, _MARGIN + (number + 0.75) * _LINE)
    return "\n".join([*parts, "</svg>", ""])


def _spans(line: Text, y: float) -> list[str]:
    """Return a line as SVG elements, with one text element per style."""
    parts, console = [], Console()
    edges = sorted({0, len(line), *(edge for one in line.spans for edge in (one.start, one.end))})
    for start, end in itertools.pairwise(edges):
        words = line.plain[start:end]
        style = line.get_style_at_offset(console, start)
        x, width = _MARGIN + start * _CHAR, (end - start) * _CHAR
        ground = _color(style.bgcolor)
        if ground:
            box = f'x="{x:.1f}" y="{y - 13:.1f}" width="{width:.1f}" height="17"'
            parts.append(f'<rect {box} fill="{ground}"/>')
        if words.strip():
            fill = _color(style.color) or (_DIM if style.dim else _TEXT)
            weight = ' font-weight="700"' if style.bold else ""
            place = f'x="{x:.1f}" y="{y:.1f}" textLength="{width:.1f}"'
            text = escape(words, quote=False)
            parts.append(f'<text {place} fill="{fill}"{weight} xml:space="preserve">{text}</text>')
    return parts


def _color(color: Color | None) -> str:
    """Return a color in SVG notation, or "" for the terminal's default color."""
    return "" if color is None or color.is_default else color.get_truecolor().hex


def page(browser: str, image: Path) -> None:
    """Write a screenshot of the incident's HTML report to `image`."""
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "page.html"
        analyze = Path(sys.executable).with_name("fr-analyze")
        subprocess.run([analyze, INCIDENT, "--html", html], check=False, capture_output=True)
        subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={folder}/profile",
                "--window-size=1280,1400",
                f"--screenshot={image}",
                html.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def main() -> None:
    """Create the terminal's picture and, if Chromium is installed, the report's picture."""
    (IMAGES / "verdict.svg").write_text(terminal(" ".join(COMMAND), on_a_terminal(COMMAND)))
    print("docs/images/verdict.svg")
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print("docs/images/fr-analyze.png: left as it is, no Chromium is installed")
        return
    page(browser, IMAGES / "fr-analyze.png")
    print("docs/images/fr-analyze.png")


if __name__ == "__main__":
    main()
