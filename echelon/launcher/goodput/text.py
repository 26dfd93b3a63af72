"""Format, as text, the record of how a job spends its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.launcher.goodput.accounting import Category
from echelon.launcher.goodput.facts import Job
from echelon.launcher.goodput.shares import Shares

_MEANINGS = {
    Category.USEFUL: "steps that count",
    Category.WAITING: "within such steps: blocked in communication",
    Category.DATA: "within such steps: waiting for data",
    Category.CHECKPOINT: "saving and loading",
    Category.REPEATED: "steps that an earlier attempt had finished",
    Category.STALL: "no progress",
    Category.RESTART: "from a failure to the next first step",
    Category.START_UP: "until the first step",
    Category.IDLE: "ended, or not part of the world",
    Category.UNMARKED: "running without marking steps",
}
_REASON_CHARS = 60


def as_text(job: Job, account: Shares) -> str:
    """Return tables of times and failures, and a line for each loss that the job survived."""
    parts = [*_categories(account), *_losses(account), *_continued(job)]
    return "\n".join([_title(job, account), "", *parts]) + "\n"


def _title(job: Job, account: Shares) -> str:
    num, attempts = len(account.ranks), len(job.attempts)
    how = f"ended by {job.ended_by} ({job.exit_code})" if job.ended_by else "not concluded"
    ranks = f"{num} rank{'s' * (num != 1)}, {attempts} attempt{'s' * (attempts != 1)}"
    title = f"job {job.job_id}: {ranks}, {duration(account.wall_ns)}, {how}"
    return f"{title}\ngoodput {100 * account.goodput:.1f} % (useful and waiting)"


def _categories(account: Shares) -> Iterator[str]:
    num = max(len(account.ranks), 1)
    rows = [("", "share", "mean", "least", "most", "")]
    for category, total in account.totals.items():
        if not total:
            continue
        by_time = sorted((of.get(category, 0), rank) for rank, of in account.ranks.items())
        least, most = (f"{duration(ns)} (rank {rank})" for ns, rank in (by_time[0], by_time[-1]))
        share = f"{100 * account.share(category):.1f} %"
        mean = duration(total // num)
        rows.append((category.value, share, mean, least, most, _MEANINGS[category]))
    yield from _aligned(rows, (-11, 8, 10, 18, 18))


def _losses(account: Shares) -> Iterator[str]:
    if not account.losses:
        return
    yield ""
    rows = [("attempt", "restart", "repeated", "failure (mean time over all ranks)")]
    for loss in account.losses:
        reason = loss.reason.splitlines()[0] if loss.reason else "not known"
        cause = f"{loss.cause}: " if loss.cause else ""
        shown = (cause + reason)[:_REASON_CHARS]
        times = duration(loss.restart_ns), duration(loss.repeated_ns)
        rows.append((str(loss.attempt), *times, shown))
    yield from _aligned(rows, (7, 10, 10))


def _continued(job: Job) -> Iterator[str]:
    lines = [f"attempt {one.number} {line}" for one in job.attempts for line in one.continued]
    if lines:
        yield ""
        yield from lines


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """Yield each row as a line, with all columns aligned except the last.

    Args:
        rows: the cells of each row.
        widths: the minimum width of each column; negative for a left-aligned column. A column grows
            to fit its longest cell.
    """
    longest = [max(len(row[place]) for row in rows) for place in range(len(widths))]
    wide = [max(abs(least), most + 2 * (place > 0))
            for place, (least, most) in enumerate(zip(widths, longest, strict=True))]  # fmt: skip
    for row in rows:
        cells = [
            cell.ljust(width) if least < 0 else cell.rjust(width)
            for cell, width, least in zip(row, wide, widths, strict=False)
        ]
        yield f"{''.join(cells)}  {row[-1]}".rstrip()


def duration(ns: int) -> str:
    """Format a duration for users: `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    seconds = ns / 1e9
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
