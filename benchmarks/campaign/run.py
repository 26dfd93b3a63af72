"""Inject random faults into training jobs under echelon's launcher and under torchrun.

    python -m benchmarks.campaign.run --jobs 8                 # kinds seen while developing
    python -m benchmarks.campaign.run --jobs 8 --held-back     # the others
    python -m benchmarks.campaign.run --jobs 8 --both          # 8 of each, alternately
    python -m benchmarks.campaign.run --jobs 80 --minutes 30 --most-load 1   # on an idle machine
    python -m benchmarks.campaign.run --table                  # of all records so far

Each job has four ranks on two nodes, or on two and a spare one, in network namespaces (needs root).
Every job runs under both launchers at the same time, with the same script, checkpoints, faults and
`--max-restarts`. Records are lines of JSON in `--out`, one per job and launcher, written as soon as
the job is over. A job with a record is not run again, so a campaign can be spread over many runs. A
record contains the commit, the processor and the load.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.campaign.jobs import LAUNCHERS, WITH_STANDBYS, run_job
from benchmarks.campaign.plan import MEAN_GAP_S, Plan, plan_of
from benchmarks.campaign.table import bars, table
from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import resumable
from benchmarks.runner.place import RESULTS, ROOT

_lock = threading.Lock()
_may_run: dict[str, bool] = {}  # by plan
_OUT = RESULTS / "campaign" / "faults.jsonl"
_OWN_LOAD = 2.0  # what a pair of jobs that has just ended may have left in the mean of a minute


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _options(arguments)
    if not options.table:
        halves = (False, True) if options.both else (options.held_back,)
        plans = [
            plan_of(seed, held_back=held_back, mean_gap_s=options.mean_gap)
            for seed in range(options.first, options.first + options.jobs)
            for held_back in halves
        ]
        run(plans, options)
    records = [one for one in _read(options.out) if options.commit in one.get("commit", "")]
    print(table(records))
    print(bars(records))
    return 0


def run(plans: Sequence[Plan], options: argparse.Namespace) -> None:
    """Run all jobs that have no record."""
    known = {(one["plan"]["name"], one["launcher"]) for one in _read(options.out)}
    launchers = options.launchers.split(",")
    until_s = time.monotonic() + 60 * options.minutes
    todo = [
        (plan, launcher)
        for plan in plans
        for launcher in launchers
        if (plan.name, launcher) not in known
    ]
    with ThreadPoolExecutor(options.at_once * len(launchers)) as pool:
        for _ in pool.map(lambda one: _one(*one, options, until_s), todo):
            pass


def _one(plan: Plan, launcher: str, options: argparse.Namespace, until_s: float) -> None:
    with _lock:  # the first launcher of a pair decides for both, so that they run side by side
        if plan.name not in _may_run:
            is_quiet = os.getloadavg()[0] <= options.most_load + _OWN_LOAD
            _may_run[plan.name] = is_quiet and time.monotonic() < until_s
    if not _may_run[plan.name]:
        print(f"{plan.name} {launcher}: left for another run", file=sys.stderr)
        return
    conditions = Conditions(peers=("torch",)).told()
    folder = Path(tempfile.mkdtemp(prefix=f"campaign-{plan.name}-{launcher}-")) / "job"
    record = run_job(plan, launcher, folder)
    record |= {"commit": _commit(), "conditions": conditions}
    line = json.dumps(record).replace(str(folder), "JOB")
    with _lock:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as out:
            out.write(line + "\n")
            out.flush()
        kinds = ", ".join(fault.kind for fault in plan.faults)
        print(f"{plan.name} {launcher}: {kinds}: {record['exit_code']}", file=sys.stderr)
    if options.keep:
        print(f"kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder.parent, ignore_errors=True)


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    return done.stdout.strip()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = resumable(__doc__, _OUT)
    parser.add_argument("--jobs", type=int, default=8, help="jobs (default 8)")
    parser.add_argument("--first", type=int, default=0, help="the first job's seed (default 0)")
    parser.add_argument("--held-back", action="store_true", help="kinds not used in development")
    parser.add_argument("--both", action="store_true", help="the others too, alternately")
    parser.add_argument("--at-once", type=int, default=1, help="pairs of jobs at a time")
    parser.add_argument("--mean-gap", type=float, default=MEAN_GAP_S, help="seconds between faults")
    parser.add_argument(
        "--launchers",
        default=",".join(LAUNCHERS),
        help=f"which to run, separated by commas (default all); also {WITH_STANDBYS}",
    )
    parser.add_argument("--commit", default="", help="of the table: records of this commit only")
    parser.add_argument("--keep", action="store_true", help="keep the jobs' folders")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
