"""Print the results of `echelon doctor`: line by line, or as one JSON object at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from echelon.launcher.doctor.check import Check
from echelon.launcher.doctor.pairwise.outcome import Outcome
from echelon.launcher.doctor.pairwise.text import lines

FORMAT = 1


class Shown:
    """The output of one run of `echelon doctor`."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._is_fit = True
        self._checks: list[Check] = []
        self._outcome: Outcome | None = None

    def check(self, check: Check) -> None:
        """Add the result of a check, and print it unless the output is JSON."""
        self._is_fit &= check.ok
        self._checks.append(check)
        mark = " " if check.ok else "!"
        self._print(f"{mark} {check.name:<15} {check.text}")

    def outcome(self, outcome: Outcome) -> None:
        """Add the measurements of links and nodes, and print them unless the output is JSON."""
        self._is_fit &= outcome.is_whole
        self._outcome = outcome
        for line in lines(outcome):
            self._print(line)

    def end(self, backends: Sequence[str]) -> int:
        """Print the backends' state or, for JSON output, all results; return the exit code."""
        for line in backends:
            self._print(line)
        if self._is_json:
            print(json.dumps(self._to_json(backends)), flush=True)
        return 0 if self._is_fit else 1

    def _print(self, line: str) -> None:
        if not self._is_json:
            print(line, flush=True)

    def _to_json(self, backends: Sequence[str]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "fit": self._is_fit,
            "checks": [{"name": c.name, "text": c.text, "ok": c.ok} for c in self._checks],
            "pairwise": None if self._outcome is None else self._outcome.to_json(),
            "backends": list(backends),
        }
