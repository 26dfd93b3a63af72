"""Run a tutorial exactly as written: `python -m tools.docs.follow PAGE FOLDER`.

The commands of a page are the lines that start with `$ ` in its `console` blocks; a backslash at
the end of a line continues the command. The commands run in FOLDER, a checkout, in one shell per
block title; different shells run concurrently. Verdicts and exit codes (the output of `echo $?`) on
the page must match the actual output. The rest of the output is not compared, because it contains
times and process IDs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"^```console(?: title=\"(?P<shell>[^\"]+)\")?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_CHECKED = re.compile(r"^(?:\s*VERDICT .*|HEALTHY .*|\d+)$")
_MARK = "-- end of command --"


@dataclass
class Step:
    """One command of a page, and the lines that its output must contain."""

    command: str
    expected: list[str] = field(default_factory=list)


def steps(page: str) -> dict[str, list[Step]]:
    """Return a page's commands in order, keyed by shell."""
    shells: dict[str, list[Step]] = {}
    for block in _BLOCK.finditer(page):
        shell = shells.setdefault(block["shell"] or "shell", [])
        for line in block["body"].splitlines():
            if shell and shell[-1].command.endswith("\\"):
                shell[-1].command += f"\n{line}"
            elif line.startswith("$ "):
                shell.append(Step(line[2:]))
            elif shell and _CHECKED.match(line):
                shell[-1].expected.append(_normal(line))
    return shells


def script(shell: list[Step]) -> str:
    """Return a shell's commands as one script that prints a mark after each command's output."""
    lines = []
    for step in shell:
        lines += [step.command, f"_code=$?; echo; echo '{_MARK}'; (exit $_code)"]
    return "\n".join(lines)


def faults(shell: list[Step], output: str) -> list[str]:
    """Return the mismatches in a shell's output, one line per command."""
    parts = output.split(f"\n{_MARK}\n")
    if len(parts) != len(shell) + 1:
        return [f"{len(parts) - 1} of {len(shell)} commands ended:\n{output}"]
    found = []
    for step, printed in zip(shell, parts, strict=False):
        lines = {_normal(line) for line in printed.splitlines()}
        missing = [line for line in step.expected if line not in lines]
        if missing:
            found.append(f"$ {step.command}\nlacks {missing}, printed:\n{printed}")
    return found


def follow(page: Path, folder: Path, timeout_s: float) -> list[str]:
    """Run a page's commands in a folder; return the differences from the page.

    Raises:
        TimeoutExpired: a shell did not exit within `timeout_s`; all shells have been killed.
    """
    shells = steps(page.read_text())
    running = {
        name: subprocess.Popen(
            ["bash", "-c", script(shell)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for name, shell in shells.items()
    }
    found = []
    try:
        for name, process in running.items():
            output, _ = process.communicate(timeout=timeout_s)
            found += [f"{name}: {fault}" for fault in faults(shells[name], output)]
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return found


def _normal(line: str) -> str:
    return " ".join(line.split())


def main() -> int:
    """Run the page given on the command line; return the exit code."""
    page, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = follow(page, folder, timeout_s=600)
    print("\n".join(found) or f"{page}: every command did what the page shows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
