"""Write the page that follows one incident from the rings to its verdict.

    python -m tools.docs.incident record    # runs the page's program and stores its incident
    python -m tools.docs.incident write     # writes the page's tables from the stored incident

A test checks that the page shows the current analysis of the stored incident.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from echelon.analysis.diagnose import RULES, report_of
from echelon.analysis.evidence.picture import Picture, take_picture
from echelon.analysis.finding import rank_list
from echelon.analysis.hypothesis import Hypothesis, propose
from echelon.analysis.report.text import plain_lines
from echelon.analysis.rules.one_rank import choice
from echelon.analysis.sources.load import load
from echelon.recorder.format.schema import State
from tools.docs.blocks import replaced

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "how-a-verdict-is-found.md"
INCIDENT = ROOT / "tests" / "data" / "incidents" / "two_groups"
PROGRAM = "two_groups.py"
_NUM_RANKS = 4
_NUM_ROWS = 3  # of each rank's record
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: str) -> str:
    """Return the program that the page shows."""
    found = _CODE.search(page)
    if found is None:
        raise ValueError("the page shows no program")
    return found[1]


def record() -> None:
    """Run the page's program until its verdict, and store its incident."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PROGRAM).write_text(program(PAGE.read_text()))
        command = [Path(sys.executable).with_name("echelon"), "run", "--nproc-per-node"]
        command += [_NUM_RANKS, "--stall-timeout", "5", "--on-stall", "stop", "--run-dir", "run"]
        subprocess.run([*map(str, command), PROGRAM], cwd=folder, check=False)
        shutil.rmtree(INCIDENT, ignore_errors=True)
        shutil.copytree(Path(folder) / "run" / "dump" / "incident_0", INCIDENT)
    for written in ("verdict.json", "verdict.txt"):
        (INCIDENT / written).unlink()  # the analysis is to come to them again


def parts(picture: Picture) -> dict[str, str]:
    """Return the generated parts of the page, keyed by name."""
    return {
        "records": _fenced(_records(picture)),
        "waits": _fenced(_waits(picture)),
        "tests": _tests(picture),
        "rules": _rules(picture),
        "verdict": _fenced(plain_lines(report_of(picture))[:-1]),  # not where it was read
    }


def _fenced(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


def _records(picture: Picture) -> list[str]:
    lines = []
    for rank, facts in picture.evidence.ranks.items():
        for row in facts.rows[-_NUM_ROWS:]:
            call = picture.evidence.call(row)
            group = picture.evidence.groups[int(row["group"])].name
            state = State(int(row["state"])).name.lower()
            site = Path(picture.evidence.tables.texts[int(row["site"])]).name
            name = f"{call.operation} #{int(row['sequence'])}"
            lines.append(f"rank {rank}  {group:<8} {name:<15} {state:<10} {site}")
        lines.append("")
    return lines[:-1]


def _waits(picture: Picture) -> list[str]:
    lines = [
        f"{rank_list(wait.waiting)} inside {wait} of group '{wait.group}' "
        f"for {wait.age_s:.1f} s, without {rank_list(wait.absent)}"
        for wait in picture.graph.waits
    ]
    graph = picture.graph
    lines += ["", f"waited for: {rank_list(sorted(graph.wanted))}"]
    lines.append(f"of these, wait themselves: {rank_list(sorted(graph.wanted & graph.blocked))}")
    return [*lines, f"wait for no rank: {rank_list(graph.sinks)}"]


def _tests(picture: Picture) -> str:
    """Return a table of the tests applied to the only rank that waits for no rank."""
    (sink,) = picture.graph.sinks
    facts = picture.evidence.ranks[sink]
    lines = ["| test | purpose | here |", "|---|---|---|"]
    for test in choice._TESTS:
        reading = test(picture, facts)
        said = "no" if reading is None else f"**{reading.cause.value}**"
        lines.append(f"| `{test.__name__}` | {_first_sentence(test)} | {said} |")
        if reading is not None:
            return "\n".join(lines)
    cause = choice.read_rank(picture, sink).cause.value
    return "\n".join([*lines, f"| none of them | It is in code of its own | **{cause}** |"])


def _rules(picture: Picture) -> str:
    lines = ["| rule | proposes | explains |", "|---|---|---|"]
    proposed = propose(picture, RULES)
    for one in proposed:
        who = rank_list(one.finding.culprit_ranks)
        explained = f"{len(one.explains)} of {len(picture.disturbed)} disturbed ranks"
        rule = RULES[one.place].__name__
        lines.append(f"| `{rule}` | {one.finding.cause.value}, {who} | {explained} |")
    silent = [rule.__name__ for place, rule in enumerate(RULES) if not _by(proposed, place)]
    names = ", ".join(f"`{name}`" for name in silent)
    return "\n".join([*lines, "", f"The other {len(silent)} rules propose nothing: {names}."])


def _by(proposed: list[Hypothesis], place: int) -> bool:
    return any(one.place == place for one in proposed)


def _first_sentence(test: object) -> str:
    return (inspect.getdoc(test) or "").splitlines()[0].rstrip(".")


def written(page: str) -> str:
    """Return the page with the current analysis of the stored incident."""
    return replaced(page, parts(take_picture(load(INCIDENT))))


def main() -> None:
    """Write the page, after recording a new incident if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["record", "write"])
    if parser.parse_args().action == "record":
        record()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
