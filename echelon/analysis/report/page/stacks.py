"""Render the page's stacks in two views: merged into one tree, and side by side."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.analysis.evidence.model import RankEvidence
from echelon.analysis.evidence.picture import Picture, last_row
from echelon.analysis.evidence.stacks.frames import Frame, main_thread, site_frame, users_frame
from echelon.analysis.evidence.stacks.tree import Branch, long_form, merge
from echelon.analysis.finding import Report
from echelon.analysis.report.clean import safe
from echelon.analysis.report.text import counted

_MAX_STACKS = 8
_MAX_FRAMES = 24
_MAX_BRANCHES = 300
_MAX_FORKS = 40  # of one branch


def stacks_section(picture: Picture, report: Report) -> str:
    """Return the page's stack sections; "" if no rank has a stack."""
    culprits = set(report.verdict.culprit_ranks) if report.verdict else set()
    return _tree_section(picture, culprits) + _columns_section(picture, culprits)


# ---- merged ----


def _tree_section(picture: Picture, culprits: set[int]) -> str:
    found: dict[int, tuple[str, ...]] = {}
    users: set[str] = set()  # frames as shown
    for rank, facts in picture.evidence.ranks.items():
        frames = _frames(picture, facts)[0]
        found[rank] = long_form(frames)
        users.update(str(frame) for frame in frames if frame.is_users)
    if sum(bool(frames) for frames in found.values()) < 2:
        return ""
    room = [_MAX_BRANCHES]
    body = _branches(merge(found), culprits, users, room, depth=0)
    count = f"{sum(bool(frames) for frames in found.values()):,} of {len(found):,} ranks"
    return (
        '<section id="tree"><h2>All stacks merged</h2>'
        f'<p class="small">{count}, outermost frame first; click to fold</p>{body}</section>'
    )


def _branches(
    branches: Sequence[Branch], culprits: set[int], users: set[str], room: list[int], depth: int
) -> str:
    ordered = sorted(branches, key=lambda one: (culprits.isdisjoint(one.ranks), -len(one.ranks)))
    shown = []
    for place, branch in enumerate(ordered):
        if not room[0] or place == _MAX_FORKS:
            rest = ordered[place:]
            count = sum(len(one.ranks) for one in rest)
            shown.append(f'<p class="small">{count:,} ranks in {len(rest):,} more branches</p>')
            break
        room[0] -= 1
        shown.append(_branch(branch, culprits, users, room, depth))
    return "".join(shown)


def _branch(
    branch: Branch, culprits: set[int], users: set[str], room: list[int], depth: int
) -> str:
    is_bad = bool(branch.ranks) and culprits.issuperset(branch.ranks)
    frames = "".join(
        f'<li class="{"own" if frame in users else ""}">{safe(frame)}</li>'
        for frame in branch.frames
    )
    below = _branches(branch.children, culprits, users, room, depth + 1)
    is_open = " open" if len(branch.ranks) > 1 or is_bad or depth < 2 else ""
    return (
        f'<details class="branch{" bad" if is_bad else ""}"{is_open}>'
        f"<summary>{safe(counted(branch.ranks))}"
        f"<span>{safe(branch.frames[-1])}</span></summary>"
        f"<ol>{frames}</ol>{below}</details>"
    )


# ---- side by side ----


def _columns_section(picture: Picture, culprits: set[int]) -> str:
    stuck = sorted(picture.disturbed | culprits, key=lambda rank: (rank not in culprits, rank))
    columns = []
    for rank in stuck:
        facts = picture.evidence.ranks.get(rank)
        column = _column(picture, facts, bad=rank in culprits) if facts is not None else ""
        if column:
            columns.append(column)
        if len(columns) == _MAX_STACKS:
            break
    if not columns:
        return ""
    note = (
        f"{len(columns)} of {len(stuck)} ranks, culprits first" if len(stuck) > len(columns) else ""
    )
    return (
        f'<section><h2>Stacks side by side</h2><div class="stacks">{"".join(columns)}</div>'
        f'<p class="small">{safe(note)}</p></section>'
    )


def _column(picture: Picture, facts: RankEvidence, *, bad: bool) -> str:
    frames, source = _frames(picture, facts)
    if not frames:
        return ""
    here = users_frame(frames)
    items = []
    for frame in frames[:_MAX_FRAMES]:
        kind = "here" if frame is here else "own" if frame.is_users else ""
        items.append(f'<li class="{kind}">{safe(str(frame))}</li>')
    style = "stack bad" if bad else "stack"
    return (
        f'<div class="{style}"><h3>rank {facts.rank}</h3><p class="small">{safe(source)}</p>'
        f"<ol>{''.join(items)}</ol></div>"
    )


def _frames(picture: Picture, facts: RankEvidence) -> tuple[tuple[Frame, ...], str]:
    thread = main_thread(facts.host.stacks)
    if thread is not None and thread.frames:
        return thread.frames, "main thread at the snapshot"
    row = last_row(facts)
    if row is None:
        return (), ""
    text = picture.evidence.tables.texts[int(row["stack"])] or picture.evidence.site(row)
    frames = tuple(frame for line in text.splitlines() if (frame := site_frame(line)) is not None)
    return frames, f"at its last call, {picture.evidence.call(row).operation}"
