"""Run `echelon report [RUN]`, which shows how a job's ranks spent their time.

The command reads the run directory of the hosting node. It works while the job is running and
after the job has ended, even if the job was killed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon import __version__
from echelon.launcher.goodput.facts import read_job
from echelon.launcher.goodput.shares import FORMAT, shares
from echelon.launcher.goodput.text import as_text
from echelon.launcher.status.status import newest_run

_RUNS = Path("runs")


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code, which is 2 if the job's record cannot be read."""
    parser = argparse.ArgumentParser(
        prog="echelon report", description="Show how each second of a job's ranks was spent."
    )
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="a run directory (default: the newest)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(list(argv))
    run = args.run or newest_run(_RUNS)
    try:
        if run is None:
            raise ValueError("there are no runs in runs/; give a run directory")
        job = read_job(run)
    except ValueError as err:
        print(f"echelon report: {err}", file=sys.stderr)
        return 2
    account = shares(job)
    if args.json:
        top = {
            "format": FORMAT,
            "job_id": job.job_id,
            "ended_by": job.ended_by,
            "exit_code": job.exit_code,
            "attempts": len(job.attempts),
            **account.to_json(),
        }
        print(json.dumps(top, indent=1))
    else:
        print(as_text(job, account), end="")
    return 0
