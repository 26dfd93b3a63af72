"""Have an incident explained by `echelon.analysis`, keep the verdict beside it, and show it.

A failing analysis never hurts the job: it is reported in one line with what to run by hand.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.launcher.rundir import write_json


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of an incident's analysis."""

    verdict: dict[str, Any] | None  # the root finding, None if there is none
    text: str  # as it was printed


def explain(incident: Path, shown: Path) -> Explanation:
    """Analyse an incident, write verdict.json and verdict.txt into it, print the verdict.

    Args:
        shown: the incident's path as the user knows it.
    """
    try:
        from rich.console import Console

        from echelon.analysis import analyze, render_text

        report = analyze(incident)
        answer = report.to_json()
        write_json(incident / "verdict.json", answer)
        text = io.StringIO()
        render_text(report, Console(file=text, width=100))
        (incident / "verdict.txt").write_text(text.getvalue())
        render_text(report, Console(stderr=True))
    except Exception as err:  # noqa: BLE001 -- the job's own end matters more than our bug
        said = (
            f"echelon: the analysis failed ({type(err).__name__}: {err}); the black boxes are in "
            f"{shown}: run fr-analyze {shown}"
        )
        print(said, file=sys.stderr)
        return Explanation(None, said)
    verdict = answer["verdict"]
    return Explanation(verdict if isinstance(verdict, dict) else None, text.getvalue())
