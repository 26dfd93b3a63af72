"""Faults in unmodified programs, and what `echelon run` says of each: cause, culprit and line.

    python -m benchmarks.unmodified run --out RESULTS.jsonl [--scripts ddp,fsdp2] [--faults ...]
        [--ranks 2,4] [--seconds 280] [--healthy 10]
    python -m benchmarks.unmodified table RESULTS.jsonl
    python -m benchmarks.unmodified overhead [--runs 30]

`run` appends one line per case and leaves out the cases that the file holds, so that it may run in
pieces. A case is right where cause and culprits are; `line` says whether the verdict names the line
of `examples/unmodified/faults.py` at which the fault stands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[1] / "examples" / "unmodified"
_SCRIPTS = ("ddp", "fsdp2", "accelerate_loop", "lightning_fit", "trainer")
_PACKAGES = {
    "accelerate_loop": "accelerate",
    "lightning_fit": "lightning",
    "trainer": "transformers",
}
# What may be said of each fault: the causes that are right.
_CAUSES = {
    "loader": {"data_starvation"},
    "worker": {"data_starvation"},
    "worker_exception": {"exception"},
    "user": {"host_hang"},
    "lock": {"host_hang"},
    "spin": {"host_hang"},
    "checkpoint": {"storage_stall"},
    "gil": {"gil_hang"},
    "frozen": {"frozen_process"},
    "kill": {"dead_process"},
    "exception": {"exception"},
    "leave": {"skipped_collective"},
    "uneven": {"skipped_collective"},
    "store": {"store_wait"},
    "shape": {"shape_mismatch"},
}
_MARK = re.compile(r"# culprit: (.*)$")
_STALL_S = 5
_CASE_S = 120.0


def _lines() -> dict[str, int]:
    """Return the line of `faults.py` at which each fault stands."""
    found = {}
    for number, text in enumerate((_EXAMPLES / "faults.py").read_text().splitlines(), 1):
        match = _MARK.search(text)
        if match:
            found |= dict.fromkeys(match[1].split(", "), number)
    return found


def _run(script: str, fault: str, ranks: int, environ: dict[str, str]) -> dict[str, Any]:
    """Run one case under the launcher and judge its verdict."""
    culprit = ranks - 1
    with tempfile.TemporaryDirectory(prefix="unmodified_") as folder:
        argv = [
            sys.executable, "-m", "echelon", "run", f"--nproc-per-node={ranks}",
            f"--stall-timeout={_STALL_S}", "--on-stall=stop", f"--run-dir={folder}/run",
            str(_EXAMPLES / f"{script}.py"), f"--fault={fault}", f"--rank={culprit}",
            f"--folder={folder}",
        ]  # fmt: skip
        began_s = time.monotonic()
        with Path(folder, "out").open("w") as out:
            done = subprocess.run(
                argv, stdout=out, stderr=subprocess.STDOUT, timeout=_CASE_S, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            )  # fmt: skip
        seconds = time.monotonic() - began_s
        path = Path(folder, "run", "dump", "latest", "verdict.json")
        verdict = json.loads(path.read_text()).get("verdict") if path.exists() else None
        said = Path(folder, "out").read_text()
    case = {"script": script, "fault": fault, "ranks": ranks, "rc": done.returncode}
    case |= {"seconds": round(seconds, 1), "alarm": verdict is not None or "stall:" in said}
    if verdict is None:
        return {**case, "right": fault == "none" and done.returncode == 0, "tail": said[-600:]}
    named = set(verdict["culprit_ranks"])
    allowed = [{culprit}, set(range(ranks))] if fault == "shape" and ranks == 2 else [{culprit}]
    line = _lines().get(fault)
    return {
        **case,
        "cause": verdict["cause"],
        "culprits": sorted(named),
        "confidence": verdict["confidence"],
        "summary": verdict["summary"],
        "right": verdict["cause"] in _CAUSES.get(fault, set()) and named in allowed,
        "line": None if line is None else f"faults.py:{line}" in json.dumps(verdict),
    }


def _measure(args: argparse.Namespace) -> None:
    out = Path(args.out)
    done = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
    known = {(one["script"], one["fault"], one["ranks"], one.get("turn", 0)) for one in done}
    healthy = [("none", turn) for turn in range(args.healthy)]
    cases = [(fault, 0) for fault in args.faults] + healthy
    end_s = time.monotonic() + args.seconds
    for (fault, turn), ranks, script in itertools.product(cases, args.ranks, args.scripts):
        if (script, fault, ranks, turn) in known or not _has(script):
            continue
        if time.monotonic() > end_s:
            print("more cases are left: run it again")
            return
        try:
            case = _run(script, fault, ranks, {})
        except subprocess.TimeoutExpired:
            case = {"script": script, "fault": fault, "ranks": ranks, "right": False}
        with out.open("a") as file:
            file.write(json.dumps({**case, "turn": turn}) + "\n")
        words = f"{case.get('cause')} {case.get('culprits')} line {case.get('line')}"
        print(
            f"{script} {fault} x{ranks}: {'ok' if case['right'] else 'WRONG'} {words}", flush=True
        )


def _has(script: str) -> bool:
    from importlib.util import find_spec

    return script not in _PACKAGES or find_spec(_PACKAGES[script]) is not None


def _table(args: argparse.Namespace) -> None:
    """Print a table of faults by scripts, and the shares."""
    cases = [json.loads(text) for text in Path(args.out).read_text().splitlines()]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        cells[case["fault"], case["script"]].append(case)
    print(f"| fault | {' | '.join(_SCRIPTS)} |\n|---|{'---|' * len(_SCRIPTS)}")
    for fault in (*_CAUSES, "none"):
        row = [_cell(cells[fault, script]) for script in _SCRIPTS]
        print(f"| {fault} | {' | '.join(row)} |")
    faulty = [case for case in cases if case["fault"] != "none"]
    right = sum(case["right"] for case in faulty)
    lines = [case["line"] for case in faulty if case.get("line") is not None]
    print(f"\ncause and culprits right: {right} of {len(faulty)}")
    print(f"line named: {sum(lines)} of {len(lines)}")
    quiet = [case for case in cases if case["fault"] == "none"]
    print(f"healthy runs: {len(quiet)}, alarms: {sum(case['alarm'] for case in quiet)}")


def _cell(cases: list[dict[str, Any]]) -> str:
    if not cases:
        return "-"
    wrong = [f"{one.get('cause')} {one.get('culprits')}" for one in cases if not one["right"]]
    lines = [one["line"] for one in cases if one.get("line") is not None]
    text = f"{len(cases) - len(wrong)} of {len(cases)}"
    text += f", line {sum(lines)} of {len(lines)}" if lines else ""
    return text + (f" ({'; '.join(wrong)})" if wrong else "")


def _overhead(args: argparse.Namespace) -> None:
    """Time steps with and without the record, in runs that alternate."""
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
            str(Path(__file__).with_name("unmodified_steps.py")), kind,
        ]  # fmt: skip
        environ = {**os.environ, "ECHELON_RECORD": record, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_CASE_S, check=True, env=environ
        )
    text = next(line for line in done.stdout.splitlines() if '"losses"' in line)
    told: dict[str, Any] = json.loads(text[text.index("{") :])
    return told


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", required=True)
    run.add_argument("--scripts", type=lambda text: text.split(","), default=_SCRIPTS)
    run.add_argument("--faults", type=lambda text: text.split(","), default=tuple(_CAUSES))
    run.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=(2, 4))
    run.add_argument("--seconds", type=float, default=280.0)
    run.add_argument("--healthy", type=int, default=0)
    run.set_defaults(act=_measure)
    table = commands.add_parser("table")
    table.add_argument("out")
    table.set_defaults(act=_table)
    overhead = commands.add_parser("overhead")
    overhead.add_argument("--runs", type=int, default=30)
    overhead.set_defaults(act=_overhead)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = _parse()
    parsed.act(parsed)
