"""Have an incident explained by `echelon.analysis`, keep the verdict beside it, and show it.

A failing analysis never hurts the job: it is reported in one line with what to run by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from echelon.launcher.rundir import write_json


def explain(incident: Path, shown: Path) -> dict[str, Any] | None:
    """Analyse an incident, write verdict.json and verdict.txt into it, print the verdict.

    Args:
        shown: the incident's path as the user knows it.

    Returns:
        The verdict's JSON (the root finding), or None if there is none.
    """
    try:
        from rich.console import Console

        from echelon.analysis import analyze, render_text

        report = analyze(incident)
        answer = report.to_json()
        write_json(incident / "verdict.json", answer)
        with (incident / "verdict.txt").open("w") as file:
            render_text(report, Console(file=file, width=100))
        render_text(report, Console(stderr=True))
    except Exception as err:  # noqa: BLE001 -- the job's own end matters more than our bug
        print(
            f"echelon: the analysis failed ({type(err).__name__}: {err}); the black boxes are in "
            f"{shown}: run fr-analyze {shown}",
            file=sys.stderr,
        )
        return None
    verdict = answer["verdict"]
    return verdict if isinstance(verdict, dict) else None
