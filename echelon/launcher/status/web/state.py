"""Read the state for the live page from the hosting node's run directory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.launcher.goodput.accounting import segments
from echelon.launcher.goodput.facts import Job, read_job
from echelon.launcher.goodput.shares import Shares, shares
from echelon.launcher.incident.verdicts import WITHDRAWN
from echelon.launcher.job.rundir import ACCOUNT
from echelon.launcher.status.status import RankStatus, read_statuses
from echelon.launcher.status.web.columns import columns

FORMAT = 1
_NUM_COLUMNS = 240
_MAX_RANKS = 256  # how many are shown: those that lag most
_MAX_INCIDENTS = 32  # how many are shown: the newest
_MAX_VERDICT_BYTES = 1 << 24
_FRESH_S = 30.0  # a running launcher writes its account at least this often


def state_of(run_dir: Path) -> dict[str, Any]:
    """Return a run's state as a JSON object. Files that cannot be read are left out."""
    job, account, age_s = _job(run_dir)
    statuses = {status.rank: status for status in read_statuses(run_dir)}
    ranks = _ranks(job, statuses)
    cut = segments(job)
    shown = sorted(ranks, key=lambda rank: -(rank["lag_s"] or 0.0))[:_MAX_RANKS]
    shown.sort(key=lambda rank: int(rank["rank"]))
    for rank in shown:
        rank["columns"] = columns(cut.get(rank["rank"], ()), job.now_ns, _NUM_COLUMNS)
    return {
        "format": FORMAT,
        "job_id": job.job_id or run_dir.name,
        "run_dir": str(run_dir),
        "phase": _phase(job, age_s),
        "wall_s": job.now_ns / 1e9,
        "attempts": len(job.attempts),
        "goodput": account.goodput,
        "shares": {one.value: account.share(one) for one in account.totals},
        "num_ranks": len(ranks),
        "ranks": shown,
        "incidents": _incidents(run_dir),
        "time_s": time.time(),
    }


def _job(run_dir: Path) -> tuple[Job, Shares, float]:
    """Return the facts about a job's time, the times by category, and the facts' age in seconds."""
    try:
        job = read_job(run_dir)
        age_s = max(0.0, time.time() - (run_dir / ACCOUNT).stat().st_mtime)
    except (ValueError, OSError):
        job, age_s = Job(job_id=""), 0.0
    if not job.ended_by and job.attempts and age_s < _FRESH_S:
        job = replace(job, now_ns=job.now_ns + int(age_s * 1e9))
    return job, shares(job), age_s


def _phase(job: Job, age_s: float) -> str:
    if job.ended_by:
        return f"ended by {job.ended_by}, exit code {job.exit_code}"
    if not job.attempts:
        return "starting"
    if age_s >= _FRESH_S:
        return f"the launcher has written nothing for {age_s:.0f} s"
    last = job.attempts[-1]
    if last.ended_ns is not None:
        return "between two attempts"
    if last.stalls and last.stalls[-1][1] < 0:
        return "stalled"
    return "running" if last.failed_ns is None else "failing"


def _ranks(job: Job, statuses: Mapping[int, RankStatus]) -> list[dict[str, Any]]:
    """Return one row per rank, from the rank's ring or from its node's last report."""
    runs = job.attempts[-1].runs if job.attempts else {}
    rows = []
    for rank in sorted({*runs, *statuses}):
        run, status = runs.get(rank), statuses.get(rank)
        row: dict[str, Any] = {
            "rank": rank,
            "host": "" if run is None else run.host,
            "phase": "",
            "operation": "",
            "lag_s": None,
            "step": None,
            "step_s": None,
        }
        if run is not None:
            row["phase"] = "ended" if run.ended_ns is not None else "running"
            row["step"] = run.step if run.step >= 0 else None
            if run.progress_ns is not None and run.ended_ns is None:
                row["lag_s"] = max(0.0, (job.now_ns - run.progress_ns) / 1e9)
        if status is not None and status.phase != "unreadable":
            row.update(
                phase=status.phase, operation=status.operation, lag_s=status.lag_s,
                step=status.step, step_s=status.step_s,
            )  # fmt: skip
        rows.append(row)
    return rows


def _incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Return the most recent incidents, newest first."""
    with contextlib.suppress(OSError):
        found = [path for path in (run_dir / "dump").glob("incident_*") if path.is_dir()]
        found.sort(key=_number, reverse=True)
        return [_incident(folder) for folder in found[:_MAX_INCIDENTS]]
    return []


def _number(folder: Path) -> int:
    text = folder.name.removeprefix("incident_")
    return int(text) if text.isdecimal() else -1


def _incident(folder: Path) -> dict[str, Any]:
    facts, top = _read(folder / "incident.json"), _read(folder / "verdict.json")
    verdict = top.get("verdict")
    verdict = verdict if isinstance(verdict, dict) else {}
    return {
        "folder": folder.name,
        "kind": str(facts.get("kind", "")),
        "attempt": facts["attempt"] if isinstance(facts.get("attempt"), int) else None,
        "withdrawn": _is_withdrawn(folder),
        "reason": str(facts.get("reason", "")),
        "cause": str(verdict.get("cause", "")),
        "confidence": str(verdict.get("confidence", "")),
        "ranks": _whole_numbers(verdict.get("culprit_ranks")),
        "summary": str(verdict.get("summary", "")),
        "next": str(verdict.get("next_action", "")),
    }


def _is_withdrawn(folder: Path) -> bool:
    """Return whether a verdict was withdrawn because the ranks had made progress."""
    try:
        text = (folder / "verdict.txt").read_text(errors="replace")
    except OSError:
        return False
    return text.rstrip().endswith(WITHDRAWN)


def _whole_numbers(value: object) -> Sequence[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_VERDICT_BYTES:
            return {}
        top = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return top if isinstance(top, dict) else {}
