"""The report for a terminal: the verdict first, and no longer than a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.analysis.finding import Confidence, Finding, Report, rank_list
from echelon.analysis.report.clean import clean

if TYPE_CHECKING:
    from rich.console import Console

_MAX_EVIDENCE = 7
_MAX_OTHERS = 3
_MAX_WARNINGS = 3
_SURE = {
    Confidence.CERTAIN: "certain",
    Confidence.LIKELY: "likely",
    Confidence.POSSIBLE: "possible",
}


def render_text(report: Report, console: Console) -> None:
    """Print a report on a rich console."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    verdict = report.verdict
    console.print(_headline(report, verdict))
    if verdict is not None:
        console.print(Padding(Text(clean(verdict.summary)), (0, 0, 1, 2)))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, lines in _sections(verdict):
            for index, line in enumerate(lines):
                table.add_row("" if index else label, Text(clean(line)))
        console.print(Padding(table, (0, 0, 0, 2)))
    rest = [finding for finding in report.findings if finding is not verdict]
    for finding in rest[:_MAX_OTHERS]:
        label = "note" if finding.info else "also"
        console.print(
            Padding(Text(f"{label}: {clean(finding.summary)}", style="dim"), (0, 0, 0, 2))
        )
    if len(rest) > _MAX_OTHERS:
        console.print(Text(f"  and {len(rest) - _MAX_OTHERS} more findings (--json)", style="dim"))
    for warning in report.warnings[:_MAX_WARNINGS]:
        console.print(Text(f"  warning: {clean(warning)}", style="yellow"))
    if len(report.warnings) > _MAX_WARNINGS:
        console.print(
            Text(f"  and {len(report.warnings) - _MAX_WARNINGS} more warnings", style="yellow")
        )
    console.print(Text(f"  {_footer(report)}", style="dim"))


def _headline(report: Report, verdict: Finding | None) -> object:
    from rich.text import Text

    line = Text()
    if verdict is None:
        line.append(" HEALTHY ", style="bold white on dark_green")
        line.append(f" nothing is wrong in {len(report.ranks_present)} ranks", style="bold")
        return line
    line.append(" VERDICT ", style="bold white on dark_red")
    line.append(f" {verdict.cause.value}", style="bold")
    if verdict.culprit_ranks:
        line.append(f" · {rank_list(verdict.culprit_ranks)}", style="bold")
    line.append(f" · {_SURE[verdict.confidence]}", style="dim")
    return line


def _sections(finding: Finding) -> list[tuple[str, list[str]]]:
    evidence = list(finding.evidence[:_MAX_EVIDENCE])
    if len(finding.evidence) > _MAX_EVIDENCE:
        evidence.append(f"and {len(finding.evidence) - _MAX_EVIDENCE} more (--json)")
    sections = [("next", [finding.next_action]), ("evidence", evidence)]
    if finding.fallout_ranks:
        sections.append(("fallout", [rank_list(finding.fallout_ranks)]))
    if finding.would_settle:
        sections.append(("would settle", list(finding.would_settle)))
    return [(label, lines) for label, lines in sections if lines and lines[0]]


def _footer(report: Report) -> str:
    present = len(report.ranks_present)
    text = f"{present} of {report.world_size} ranks"
    if report.ranks_missing:
        text += f", missing: {rank_list(report.ranks_missing)}"
    return f"{text} · {clean(report.origin)}" if report.origin else text
