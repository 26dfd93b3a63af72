"""Inject faults into unmodified programs, and judge the verdicts: cause, culprit and line.

    python -m benchmarks.unmodified.run cases [--out RESULTS.jsonl] [--scripts ddp,fsdp2]
        [--faults ...] [--ranks 2,4] [--seconds 280] [--healthy 10] [--attach] [--keep DIR]
    python -m benchmarks.unmodified.run table [RESULTS.jsonl]    # then: make bench-docs
    python -m benchmarks.unmodified.run overhead [--runs 30]

`cases` appends one line per case and skips cases that the file already contains, so that it can be
interrupted and resumed. A wrong case runs again once the code has changed, and its last result
counts. With `--attach`, plain torchrun launches the jobs and `fr-analyze --attach` examines them. A
case is right if cause and culprits are right; `line` records whether the verdict names the line of
`examples/unmodified/faults.py` that contains the fault. Each case also updates the tables of
docs/benchmarks/unmodified.md, which are stored next to the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runner.place import RESULTS, ROOT
from benchmarks.unmodified.cases import (
    CASE_S,
    CAUSES,
    ENDS_A_JOB,
    HEALTHY,
    STALL_S,
    Case,
    NotReachedError,
    attach_case,
    launch_case,
)
from benchmarks.unmodified.tables import SCRIPTS, key, latest, save

_CASES = RESULTS / "unmodified" / "cases.jsonl"
_PACKAGES = {
    "accelerate_loop": "accelerate",
    "lightning_fit": "lightning",
    "trainer": "transformers",
    "deepspeed_zero": "deepspeed",
}


def _measure(args: argparse.Namespace) -> None:
    if args.attach and args.healthy:
        raise SystemExit("--attach takes no --healthy: such a job may end before it is looked at")
    out = Path(args.out)
    code = _code()
    done = latest(_read(out)) if out.exists() else []
    known = {key(case) for case in done if case["right"] or case.get("code") == code}
    left_out = ENDS_A_JOB if args.attach else ()
    faults = [one for one in args.faults if one in CAUSES and one not in left_out]
    healthy = [(HEALTHY[turn % len(HEALTHY)], turn) for turn in range(args.healthy)]
    cases = [(fault, 0) for fault in faults] + healthy
    end_s = time.monotonic() + args.seconds
    order = list(itertools.product(cases, args.ranks, args.scripts))
    random.Random(0).shuffle(order)  # so that a part of them is a fair sample
    order.sort(key=lambda one: one[1])  # the short ones first: fewer ranks import
    for (fault, turn), ranks, script in order:
        case: Case = {"script": script, "fault": fault, "ranks": ranks, "turn": turn}
        case |= {"attach": args.attach, "code": code, "stall_s": STALL_S}
        case |= {"load": round(os.getloadavg()[0], 1)}
        if key(case) in known or not _has(script):
            continue
        if time.monotonic() > end_s:
            print("more cases are left: run it again")
            return
        try:
            run = attach_case if args.attach else launch_case
            case |= run(script, fault, ranks, args.keep)
        except NotReachedError as err:
            print(f"{script} {fault} x{ranks}: left for the next run: {err}", flush=True)
            continue
        except subprocess.TimeoutExpired:
            case |= {"right": False, "alarm": False, "cause": "no end"}
        with out.open("a") as file:
            file.write(json.dumps(case) + "\n")
        save(_read(out), out.parent)
        words = f"{case.get('cause')} {case.get('culprits')} line {case.get('line')}"
        judged = "ok" if case["right"] else "WRONG"
        print(f"{script} {fault} x{ranks}: {judged} {words}", flush=True)


def _code() -> str:
    """Return git's hash of the committed code that the cases exercise: runtime and examples."""
    told = subprocess.run(
        ["git", "rev-parse", "HEAD:echelon", "HEAD:examples/unmodified"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return " ".join(one[:10] for one in told.stdout.split())


def _read(path: Path) -> list[Case]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def _has(script: str) -> bool:
    from importlib.util import find_spec

    return script not in _PACKAGES or find_spec(_PACKAGES[script]) is not None


def _overhead(args: argparse.Namespace) -> None:
    """Time steps with and without recording, in alternating runs."""
    for kind in ("ddp", "fsdp2"):
        runs: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
        for _ in range(args.runs):
            for record, measured in runs.items():
                measured.append(_steps(kind, record))
        told = [f"{kind}: {args.runs} pairs of runs"]
        for name in ("best_ms", "median_ms", "cpu_ms"):
            without, with_record = (
                statistics.median(run[name] for run in runs[record]) for record in ("0", "1")
            )
            told.append(f"{name} {without:.3f} -> {with_record:.3f} ({with_record / without:.3f})")
        same = all(run["losses"] == runs["0"][0]["losses"] for run in runs["0"] + runs["1"])
        print("; ".join([*told, f"losses equal bit for bit: {same}"]), flush=True)


def _steps(kind: str, record: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="unmodified_") as folder:
        argv = [
            sys.executable, "-m", "echelon", "run", "--nproc-per-node=2", f"--run-dir={folder}",
            str(Path(__file__).with_name("steps.py")), kind,
        ]  # fmt: skip
        environ = {**os.environ, "ECHELON_RECORD": record, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=CASE_S, check=True, env=environ
        )
    text = next(line for line in done.stdout.splitlines() if '"losses"' in line)
    told: dict[str, Any] = json.loads(text[text.index("{") :])
    return told


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("cases")
    run.add_argument("--out", default=_CASES)
    run.add_argument("--scripts", type=lambda text: text.split(","), default=SCRIPTS)
    run.add_argument(
        "--faults",
        type=lambda text: text.split(","),
        default=tuple(CAUSES),
        help="none: only healthy runs",
    )
    run.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=(2, 4))
    run.add_argument("--seconds", type=float, default=280.0)
    run.add_argument("--healthy", type=int, default=0)
    run.add_argument("--attach", action="store_true")
    run.add_argument("--keep", type=Path, help="keeps the run directories of wrong verdicts")
    run.set_defaults(act=_measure)
    table = commands.add_parser("table")
    table.add_argument("out", type=Path, nargs="?", default=_CASES)
    table.set_defaults(act=lambda args: save(_read(args.out), args.out.parent))
    overhead = commands.add_parser("overhead")
    overhead.add_argument("--runs", type=int, default=30)
    overhead.set_defaults(act=_overhead)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = _parse()
    parsed.act(parsed)
