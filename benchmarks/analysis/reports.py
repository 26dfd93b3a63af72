"""Regenerate the reports in docs/verdicts.md from the fault matrix.

    python -m benchmarks.analysis.reports [--page docs/verdicts.md] [--only TEXT,...]

Each block after a line `<!-- report of CASE -->` is replaced by the output of `fr-analyze` for that
case of `faults.py`, so that the page shows the program's current output. All other text is kept. If
a case's verdict is not the expected one, its block is left unchanged and the case is listed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.analysis import faults
from benchmarks.runner.place import ROOT

PAGE = ROOT / "docs/verdicts.md"
COLUMNS = "92"  # fits the page without a scroll bar
_BLOCK = re.compile(r"(<!-- report of (?P<case>\S+) -->\n\n```text\n)(?P<report>.*?)(```\n)", re.S)


def main() -> int:
    """Replace the reports; return 1 if a report could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", default="", metavar="TEXT,...", help="cases that hold these")
    options = parser.parse_args()
    page = options.page.read_text()
    cases = {case.name: case for case in faults.CASES}
    unknown = {found["case"] for found in _BLOCK.finditer(page)} - set(cases)
    if unknown:
        parser.error(f"{options.page}: faults.py has no case {', '.join(sorted(unknown))}")
    failed = 0
    for found in _BLOCK.finditer(page):
        name = found["case"]
        if not any(part in name for part in options.only.split(",")):
            continue
        report = report_of(cases[name])
        if report is None:
            print(f"{name}: another verdict than expected; its report stays as it was")
            failed += 1
            continue
        page = page.replace(found[0], f"{found[1]}{report}{found[4]}")
        options.page.write_text(page)
        print(f"{name}: written", flush=True)
    return int(failed > 0)


def report_of(case: faults.Case) -> str | None:
    """Run a case; return the output of `fr-analyze`, or None if the verdict is unexpected."""
    with tempfile.TemporaryDirectory(prefix="reports-") as temporary:
        runs = Path(temporary, "runs")
        runs.mkdir()
        if faults.run(case, runs).said != case.expected:
            return None
        (runs / case.name).rename(runs / "job")
        shown = on_terminal([sys.executable, "-m", "echelon.analysis", "runs/job"], temporary)
    lines = shown.replace(f"{temporary}/", "").replace(f"{ROOT}/", "").splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def on_terminal(command: list[str], folder: str) -> str:
    """Return a command's output on a terminal of `COLUMNS` columns, without colors."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": COLUMNS, "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=folder, stdout=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    process.wait()
    return shown.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    sys.exit(main())
