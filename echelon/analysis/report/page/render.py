"""Render the report as one self-contained HTML file, with a light and a dark theme.

The page shows the verdict, the timeline, the wait-for graph, the stacks and a breakdown of the
job's time. It is assembled from `page.html`, `style.css` and `script.js` in this folder. All
recorded data is untrusted and therefore escaped. A content security policy prevents the page from
loading or sending data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from echelon import __version__
from echelon.analysis.evidence.picture import Picture
from echelon.analysis.evidence.timing import COMMUNICATION, CallTime, RankTime, Timing, timing_of
from echelon.analysis.finding import Finding, Report, rank_list, rate, seconds
from echelon.analysis.report.clean import safe
from echelon.analysis.report.page.graph import draw
from echelon.analysis.report.page.graph_svg import render_graph
from echelon.analysis.report.page.stacks import stacks_section
from echelon.analysis.report.page.template import fill
from echelon.analysis.report.page.timeline import timeline
from echelon.analysis.report.text import alternative_line

_MAX_ROWS = 16
_PHASE_COLORS = {
    COMMUNICATION: "#5b8def",
    "compute": "#4fae7b",
    "data_wait": "#e0a63b",
    "checkpoint": "#a775d8",
}


def write_html(picture: Picture, report: Report, path: Path) -> None:
    """Write the report to a file as an HTML page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(render_html(picture, report), encoding="utf-8")


def render_html(picture: Picture, report: Report) -> str:
    """Return the report as an HTML page."""
    verdict = report.verdict
    culprits = list(verdict.culprit_ranks) if verdict else []
    data = {"timeline": timeline(picture), "culprits": culprits}
    clear = "undecided" if report.undecided else "healthy"
    title = f"{verdict.cause.value}: {rank_list(verdict.culprit_ranks)}" if verdict else clear
    return fill(
        {
            "title": safe(title),
            "verdict": _verdict(report),
            "num_ranks": str(len(picture.evidence.ranks)),
            "graph": render_graph(draw(picture.graph, culprits), set(culprits)),
            "stacks": stacks_section(picture, report),
            "others": _others(report),
            "time": _time(timing_of(picture)),
            "footer": " · ".join(filter(None, (f"echelon {__version__}", safe(report.origin)))),
            "data": _json(data),
        }
    )


def _json(value: Any) -> str:
    """Encode a value as JSON that cannot close the script element in which it is embedded."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- the verdict ----


def _verdict(report: Report) -> str:
    verdict = report.verdict
    if verdict is None:
        clear = "undecided" if report.undecided else "healthy"
        said = "Nothing points to a fault" if report.undecided else "Nothing is wrong"
        head = f'<div class="tags"><span class="tag cause">{clear}</span></div>'
        body = f"<h1>{said} in {len(report.ranks_present)} ranks</h1>"
        return f'<section class="verdict well">{head}{body}{_warnings(report)}</section>'
    tags = [f'<span class="tag cause">{safe(verdict.cause.value)}</span>']
    if verdict.culprit_ranks:
        tags.append(f'<span class="tag">{safe(rank_list(verdict.culprit_ranks))}</span>')
    tags.append(f'<span class="tag">{safe(verdict.confidence.value)}</span>')
    return (
        f'<section class="verdict" id="verdict"><div class="tags">{"".join(tags)}</div>'
        f"<h1>{safe(verdict.summary)}</h1>"
        f'<p class="next"><b>Next</b>{safe(verdict.next_action)}</p>'
        f'<div class="cols"><div><h2>Evidence</h2>{_list(verdict.evidence)}</div>'
        f"<div><h2>At a glance</h2>{_glance(report, verdict)}</div></div>"
        f"{_warnings(report)}</section>"
    )


def _glance(report: Report, verdict: Finding) -> str:
    pairs = [("ranks", f"{len(report.ranks_present)} of {report.world_size}")]
    if report.ranks_missing:
        pairs.append(("missing", rank_list(report.ranks_missing)))
    if verdict.operation is not None:
        number = f" #{verdict.sequence}" if verdict.sequence is not None else ""
        pairs.append(("operation", f"{verdict.operation}{number}"))
    if verdict.group:
        pairs.append(("group", verdict.group))
    if verdict.fallout_ranks:
        pairs.append(("fallout", rank_list(verdict.fallout_ranks)))
    if verdict.would_settle:
        pairs.append(("missing evidence", "; ".join(verdict.would_settle)))
    for other in verdict.alternatives[:1]:
        pairs.append(("runner-up", alternative_line(other)))
    items = "".join(f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in pairs)
    return f"<dl>{items}</dl>"


def _warnings(report: Report) -> str:
    shown = report.warnings[:5]
    more = len(report.warnings) - len(shown)
    lines = [f"warning: {safe(warning)}" for warning in shown]
    lines += [f"and {more} more warnings"] if more > 0 else []
    return f'<p class="small">{"<br>".join(lines)}</p>' if lines else ""


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{safe(line)}</li>" for line in lines) + "</ul>"


def _others(report: Report) -> str:
    rest = [finding for finding in report.findings if finding is not report.verdict]
    if not rest:
        return ""
    lines = [
        f"{finding.cause.value}{' (note)' if finding.info else ''}: {finding.summary}"
        for finding in rest[:_MAX_ROWS]
    ]
    return f"<section><h2>Also found</h2>{_list(lines)}</section>"


# ---- where the time went ----


def _time(timing: Timing) -> str:
    ranks = [rank for rank in timing.slowest if rank.window_s > 0]
    if not ranks and not timing.calls:
        return ""
    tables = ""
    if ranks:
        tables += _table(
            ("rank", "mean lag", "last in", "phases", ""),
            [_rank_row(rank) for rank in ranks[:_MAX_ROWS]],
        )
        more = len(ranks) - _MAX_ROWS
        tables += f'<p class="small">and {more} more ranks</p>' if more > 0 else ""
    if timing.calls:
        tables += "<br>" * bool(ranks) + _table(
            ("collective", "group", "calls", "own time", "each", "rate per rank"),
            [_call_row(call) for call in timing.calls[:10]],
        )
    return f"<section><h2>Where the time went</h2>{tables}</section>"


def _rank_row(rank: RankTime) -> Sequence[str]:
    parts = []
    words = []
    for name, length_s in sorted(rank.phases_s.items(), key=lambda item: -item[1])[:6]:
        share = min(1.0, length_s / rank.window_s)
        if share < 0.005:
            continue
        color = _PHASE_COLORS.get(name, "#8a94a6")
        parts.append(f'<div style="width:{share * 100:.1f}%;background:{color}"></div>')
        words.append(f"{name} {share:.0%}")
    return (
        f"<td>rank {rank.rank}</td>",
        f'<td class="n">{safe(seconds(rank.mean_lag_s))}</td>',
        f'<td class="n">{rank.last_share:.0%}</td>',
        f'<td><div class="phases">{"".join(parts)}</div></td>',
        f"<td>{safe(', '.join(words))}</td>",
    )


def _call_row(call: CallTime) -> Sequence[str]:
    each_s = call.total_s / max(1, call.count)
    return (
        f"<td>{safe(call.call)}</td>",
        f"<td>{safe(call.group)}</td>",
        f'<td class="n">{call.count}</td>',
        f'<td class="n">{safe(seconds(call.total_s))}</td>',
        f'<td class="n">{safe(seconds(each_s))}</td>',
        f'<td class="n">{safe(rate(call.bytes_per_s))}</td>',
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numbers = [cell.startswith('<td class="n"') for cell in rows[0]] if rows else []
    top = "".join(
        f"<th{' class=n' if is_number else ''}>{safe(head)}</th>"
        for head, is_number in zip_longest(heads, numbers)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
