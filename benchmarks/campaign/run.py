"""Random faults in training jobs, under echelon's launcher and under torchrun, side by side.

    python benchmarks/campaign/run.py --jobs 8                 # kinds seen while developing
    python benchmarks/campaign/run.py --jobs 8 --held-back     # the others
    python benchmarks/campaign/run.py --table                  # of all records so far

Each job has four ranks on two nodes, or on two and a spare one, in network namespaces (root). Every
job runs under both launchers at the same time, with the same script, checkpoints, faults and
`--max-restarts`. Records are lines of JSON in `--out`; jobs with a record are not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jobs import LAUNCHERS, WITH_STANDBYS, run_job
from plan import MEAN_GAP_S, Plan, plan_of
from table import table

_lock = threading.Lock()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _options(arguments)
    if not options.table:
        plans = [
            plan_of(seed, held_back=options.held_back, mean_gap_s=options.mean_gap)
            for seed in range(options.first, options.first + options.jobs)
        ]
        run(plans, options)
    print(table(_read(options.out)))
    return 0


def run(plans: Sequence[Plan], options: argparse.Namespace) -> None:
    """Run all jobs without a record."""
    known = {(one["plan"]["name"], one["launcher"]) for one in _read(options.out)}
    launchers = options.launchers.split(",")
    todo = [
        (plan, launcher)
        for plan in plans
        for launcher in launchers
        if (plan.name, launcher) not in known
    ]
    with ThreadPoolExecutor(options.at_once * len(launchers)) as pool:
        for _ in pool.map(lambda one: _one(*one, options), todo):
            pass


def _one(plan: Plan, launcher: str, options: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"campaign-{plan.name}-{launcher}-")) / "job"
    record = run_job(plan, launcher, folder)
    record["folder"] = str(folder)
    with _lock:
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        kinds = ", ".join(fault.kind for fault in plan.faults)
        print(f"{plan.name} {launcher}: {kinds}: {record['exit_code']}", file=sys.stderr)
    if not options.keep:
        shutil.rmtree(folder.parent, ignore_errors=True)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=8, help="jobs (default 8)")
    parser.add_argument("--first", type=int, default=0, help="the first job's seed (default 0)")
    parser.add_argument("--held-back", action="store_true", help="kinds not used in development")
    parser.add_argument("--at-once", type=int, default=1, help="pairs of jobs at a time")
    parser.add_argument("--mean-gap", type=float, default=MEAN_GAP_S, help="seconds between faults")
    parser.add_argument(
        "--launchers",
        default=",".join(LAUNCHERS),
        help=f"which to run, separated by commas (default all); also {WITH_STANDBYS}",
    )
    parser.add_argument("--out", type=Path, default=Path("campaign.jsonl"))
    parser.add_argument("--keep", action="store_true", help="keep the jobs' folders")
    parser.add_argument("--table", action="store_true", help="only print the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
