"""Render the report as text that fits on one terminal screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from echelon.analysis.finding import Alternative, Finding, Report, rank_list, rate, seconds
from echelon.analysis.report.clean import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from echelon.analysis.evidence.stacks.tree import Branch
    from echelon.analysis.evidence.timing import RankTime, Timing

_MAX_EVIDENCE = 7
_MAX_OTHERS = 3
_MAX_WARNINGS = 3
_MAX_RANKS = 4
_MAX_CALLS = 4
_MAX_CHARS = 400
_MAX_PLACES = 8
_MAX_FRAMES = 4  # innermost frames shown of a run that ranks share


def render_text(report: Report, console: Console, timing: Timing | None = None) -> None:
    """Print a report to a rich console, or as plain lines if the output is not a terminal.

    Args:
        timing: a breakdown of the job's time, printed after a healthy report.

    Example:
        >>> from rich.console import Console
        >>> render_text(analyze(incident), Console(width=96))
        VERDICT  host_hang · rank 1 · certain
        ...
    """
    if not console.is_terminal:
        for line in plain_lines(report, timing):
            console.file.write(f"{line}\n")
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    verdict = report.verdict
    console.print(_headline(report, verdict))
    if verdict is not None:
        console.print(Padding(Text(clean(verdict.summary, _MAX_CHARS)), (0, 0, 1, 2), expand=False))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, lines in _sections(verdict, report):
            for index, line in enumerate(lines):
                table.add_row("" if index else label, _indented(clean(line, _MAX_CHARS)))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
    elif timing is not None:
        _print_timing(timing, console)
    for line, style in _tail(report, verdict):
        console.print(_indented(f"  {line}", style))


def _indented(line: str, style: str = "") -> Padding:
    """Indent a line so that, if it wraps, its continuation lines are also indented."""
    from rich.padding import Padding
    from rich.text import Text

    text = line.lstrip(" ")
    return Padding(Text(text, style=style), (0, 0, 0, len(line) - len(text)), expand=False)


def plain_lines(report: Report, timing: Timing | None = None) -> list[str]:
    """Return the report as lines without wrapping or padding."""
    verdict = report.verdict
    lines = [_headline(report, verdict).plain.strip()]
    if verdict is not None:
        lines += [f"  {clean(verdict.summary, _MAX_CHARS)}", ""]
        sections = _sections(verdict, report)
        width = max(len(label) for label, _ in sections) + 2
        for label, rows in sections:
            for index, row in enumerate(rows):
                head = "" if index else label
                lines.append(f"  {head:<{width}}{clean(row, _MAX_CHARS)}")
    elif timing is not None:
        for title, cells in _timing_rows(timing):
            lines += _columns([title, *cells])
    return [*lines, *(f"  {line}" for line, _ in _tail(report, verdict))]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        " "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _headline(report: Report, verdict: Finding | None) -> Text:
    from rich.text import Text

    line = Text()
    if verdict is None:
        style, word, said = _clear_words(report)
        line.append(f" {word} ", style=f"bold white on {style}")
        line.append(f" {said} in {len(report.ranks_present)} ranks", style="bold")
        return line
    line.append(" VERDICT ", style="bold white on dark_red")
    line.append(f" {verdict.cause.value}", style="bold")
    if verdict.culprit_ranks:
        line.append(f" · {rank_list(verdict.culprit_ranks)}", style="bold")
    line.append(f" · {verdict.confidence.value}", style="dim")
    return line


def _clear_words(report: Report) -> tuple[str, str, str]:
    if report.undecided:
        return "dark_goldenrod", "UNDECIDED", "nothing points to a fault"
    return "dark_green", "HEALTHY", "nothing is wrong"


def _sections(finding: Finding, report: Report) -> list[tuple[str, list[str]]]:
    evidence = list(finding.evidence[:_MAX_EVIDENCE])
    if len(finding.evidence) > _MAX_EVIDENCE:
        evidence.append(f"and {len(finding.evidence) - _MAX_EVIDENCE} more (--json)")
    sections = [("next", [finding.next_action]), ("evidence", evidence)]
    if len(report.ranks_present) > 1:
        sections.append(("stacks", stack_lines(report.stacks, finding.culprit_ranks)))
    if finding.fallout_ranks:
        sections.append(("fallout", [rank_list(finding.fallout_ranks)]))
    if finding.would_settle:
        sections.append(("missing", list(finding.would_settle)))
    if finding.alternatives:
        sections.append(("runner-up", [alternative_line(finding.alternatives[0])]))
    return [(label, lines) for label, lines in sections if lines and lines[0]]


def stack_lines(branches: Sequence[Branch], culprits: Sequence[int]) -> list[str]:
    """Describe where in the program the ranks are: one line per position, culprits first.

    Frames common to several ranks are on one line. Where the stacks diverge, each continuation is
    on its own line, indented below.
    """
    lines: list[tuple[str, Branch]] = []
    _add_places(lines, branches, set(culprits), 0)
    if len(lines) <= _MAX_PLACES:
        return [line for line, _ in lines]
    shown, rest = lines[: _MAX_PLACES - 1], lines[_MAX_PLACES - 1 :]
    ends = [branch for _, branch in rest if not branch.children]
    count = sum(len(branch.ranks) for branch in ends)
    more = f"{count:,} ranks at {len(ends):,} more places (--html)"
    return [*(line for line, _ in shown), more]


def _add_places(
    lines: list[tuple[str, Branch]], branches: Sequence[Branch], culprits: set[int], depth: int
) -> None:
    ordered = sorted(branches, key=lambda one: (culprits.isdisjoint(one.ranks), -len(one.ranks)))
    for branch in ordered:
        frames = branch.frames[-_MAX_FRAMES:]
        cut = "... > " if len(frames) < len(branch.frames) else ""
        where = f"{cut}{' > '.join(frames)}"
        lines.append((f"{'  ' * depth}{counted(branch.ranks)}: {where}", branch))
        _add_places(lines, branch.children, culprits, depth + 1)


def counted(ranks: Sequence[int]) -> str:
    """Format ranks with their count: `1,021 ranks (0-6 and 10-1023)`, or `rank 7` for one rank."""
    names = rank_list(ranks)
    if len(ranks) < 2:
        return names
    return f"{len(ranks):,} {names.replace('ranks ', 'ranks (', 1)})"


def alternative_line(other: Alternative) -> str:
    """Format a finding that was rejected as a root cause, and the argument against it."""
    who = f" · {rank_list(other.culprit_ranks)}" if other.culprit_ranks else ""
    return f"{other.cause.value}{who}: {other.summary} ({other.against})"


def _tail(report: Report, verdict: Finding | None) -> list[tuple[str, str]]:
    rest = [finding for finding in report.findings if finding is not verdict]
    lines = [
        (f"{'note' if f.info else 'also'}: {clean(f.summary, _MAX_CHARS)}", "dim")
        for f in rest[:_MAX_OTHERS]
    ]
    if len(rest) > _MAX_OTHERS:
        lines.append((f"and {len(rest) - _MAX_OTHERS} more findings (--json)", "dim"))
    shown = report.warnings[:_MAX_WARNINGS]
    lines += [(f"warning: {clean(warning, _MAX_CHARS)}", "yellow") for warning in shown]
    if len(report.warnings) > len(shown):
        lines.append((f"and {len(report.warnings) - len(shown)} more warnings", "yellow"))
    return [*lines, (_footer(report), "dim")]


def _footer(report: Report) -> str:
    text = f"read {len(report.ranks_present)} of {report.world_size} ranks"
    if report.ranks_missing:
        text += f" (missing: {rank_list(report.ranks_missing)})"
    return f"{text}, {clean(report.origin)}" if report.origin else text


# ---- where the time went ----


def _print_timing(timing: Timing, console: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for title, rows in _timing_rows(timing):
        table = Table(*title, box=None, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(Padding(table, (0, 0, 0, 1), expand=False))


def _timing_rows(timing: Timing) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the tables of a healthy report, each as column titles and rows."""
    ranks = [rank for rank in timing.slowest if rank.window_s > 0][:_MAX_RANKS]
    if ranks:
        yield (
            ["slowest ranks", "mean lag", "last in", "phases"],
            [
                [
                    f"rank {rank.rank}",
                    seconds(rank.mean_lag_s),
                    f"{rank.last_share:.0%}",
                    clean(phase_words(rank)),
                ]
                for rank in ranks
            ],
        )
    if timing.calls:
        yield (
            ["collective", "calls", "time", "rate"],
            [
                [
                    clean(f"{call.call} · {call.group}", 90),
                    str(call.count),
                    seconds(call.total_s),
                    rate(call.bytes_per_s),
                ]
                for call in timing.calls[:_MAX_CALLS]
            ],
        )


def phase_words(rank: RankTime) -> str:
    """Format a rank's time by phase, for example `compute 61%, communication 22%`."""
    pairs: Sequence[tuple[str, float]] = sorted(rank.phases_s.items(), key=lambda item: -item[1])
    parts = [(name, length / rank.window_s) for name, length in pairs[:4]]
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
