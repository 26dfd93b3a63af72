"""Have an incident explained by `echelon.analysis`, keep the verdict beside it, and show it.

A failing analysis never hurts the job: it is reported in one line with what to run by hand.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.launcher.report import Ended
from echelon.launcher.rundir import write_json
from echelon.launcher.story import Story, Victims, root_cause_story


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of an incident's analysis."""

    verdict: dict[str, Any] | None  # the root finding, None if there is none
    story: Story | None  # what the root cause said last
    victims: Victims
    text: str  # as it was printed


def explain(incident: Path, shown: Path, ended: Mapping[int, Ended]) -> Explanation:
    """Analyse an incident, write verdict.json and verdict.txt into it, print the verdict.

    Args:
        shown: the incident's path as the user knows it.
        ended: how ranks have ended so far.
    """
    victims = Victims.of(None, {})
    try:
        from rich.console import Console

        from echelon.analysis import analyze, render_text

        report = analyze(incident)
        answer = report.to_json()
        write_json(incident / "verdict.json", answer)
        story = root_cause_story(incident, answer["verdict"])
        victims = Victims.of(answer["verdict"], ended)
        lines = [*(story.lines() if story else []), victims.line()]
        said = "".join(f"{line}\n" for line in lines if line)
        text = io.StringIO()
        render_text(report, Console(file=text, width=100))
        (incident / "verdict.txt").write_text(said + text.getvalue())
        print(said, end="", file=sys.stderr)
        render_text(report, Console(stderr=True))
    except Exception as err:  # noqa: BLE001 -- the job's own end matters more than our bug
        said = (
            f"echelon: the analysis failed ({type(err).__name__}: {err}); the black boxes are in "
            f"{shown}: run fr-analyze {shown}"
        )
        print(said, file=sys.stderr)
        return Explanation(None, None, victims, said)
    verdict = answer["verdict"]
    return Explanation(
        verdict if isinstance(verdict, dict) else None, story, victims, said + text.getvalue()
    )
