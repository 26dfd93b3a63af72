"""Faults in unmodified programs, and the verdicts of `echelon run`: cause, culprit and line.

    python -m benchmarks.unmodified run --out RESULTS.jsonl [--scripts ddp,fsdp2] [--faults ...]
        [--ranks 2,4] [--seconds 280] [--healthy 10] [--attach] [--keep DIR]
    python -m benchmarks.unmodified table RESULTS.jsonl [--into docs/unmodified.md]
    python -m benchmarks.unmodified overhead [--runs 30]

`run` appends one line per case and skips cases that the file already holds, so that it can run in
pieces; a wrong case runs again once the code has changed, and its last result counts. With
`--attach`, plain torchrun launches the jobs and `fr-analyze --attach` examines them. A case is
right if cause and culprits are; `line` records whether the verdict names the line of
`examples/unmodified/faults.py` that contains the fault. `--into` replaces the table between the two
marks of a document.
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
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.unmodified_cases import (
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

_SCRIPTS = ("ddp", "fsdp2", "accelerate_loop", "lightning_fit", "trainer", "deepspeed_zero")
_PACKAGES = {
    "accelerate_loop": "accelerate",
    "lightning_fit": "lightning",
    "trainer": "transformers",
    "deepspeed_zero": "deepspeed",
}
BEGIN = "<!-- table: written by `python -m benchmarks.unmodified table` -->"
END = "<!-- end of the table -->"


def _measure(args: argparse.Namespace) -> None:
    if args.attach and args.healthy:
        raise SystemExit("--attach takes no --healthy: such a job may end before it is looked at")
    out = Path(args.out)
    code = _code()
    done = latest(_read(out)) if out.exists() else []
    known = {_key(case) for case in done if case["right"] or case.get("code") == code}
    faults = [one for one in args.faults if not (args.attach and one in ENDS_A_JOB)]
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
        if _key(case) in known or not _has(script):
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
        words = f"{case.get('cause')} {case.get('culprits')} line {case.get('line')}"
        judged = "ok" if case["right"] else "WRONG"
        print(f"{script} {fault} x{ranks}: {judged} {words}", flush=True)


def latest(cases: list[Case]) -> list[Case]:
    """Return the last result of each case, in the order in which the cases first ran."""
    return list({_key(case): case for case in cases}.values())


def _code() -> str:
    """Return git's hash of the runtime and the examples as committed: what the cases exercise."""
    told = subprocess.run(
        ["git", "rev-parse", "HEAD:echelon", "HEAD:examples/unmodified"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    return " ".join(one[:10] for one in told.stdout.split())


def _read(path: Path) -> list[Case]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def _key(case: Case) -> tuple[object, ...]:
    names = ("script", "fault", "ranks", "turn", "attach")
    return tuple(case.get(name, 0) for name in names)


def _has(script: str) -> bool:
    from importlib.util import find_spec

    return script not in _PACKAGES or find_spec(_PACKAGES[script]) is not None


def write_table(results: Path, into: Path | None) -> None:
    """Print tables of faults by scripts, with the shares, or put them into a document.

    Raises:
        SystemExit: the document lacks the two marks between which the tables stand.
    """
    cases = latest(_read(results))
    launched = [case for case in cases if not case.get("attach")]
    attached = [case for case in cases if case.get("attach")]
    text = "\n\n".join(
        f"{title}\n\n{_rows(some)}"
        for title, some in (("Under `echelon run`:", launched), ("Attached to torchrun:", attached))
        if some
    )
    if into is None:
        print(text)
        return
    before, begin, rest = into.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{into} lacks the two marks of the table: {BEGIN} and {END}")
    into.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _rows(cases: list[Case]) -> str:
    num_ended = sum(bool(case.get("ended")) for case in cases)
    cases = [case for case in cases if not case.get("ended")]
    cells: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        cells[case["fault"], case["script"]].append(case)
    lines = [f"| fault | {' | '.join(_SCRIPTS)} |", f"|---|{'---|' * len(_SCRIPTS)}"]
    for fault in (*CAUSES, *HEALTHY):
        row = [_cell(cells[fault, script]) for script in _SCRIPTS]
        if any(cell != "-" for cell in row):
            lines.append(f"| {fault} | {' | '.join(row)} |")
    faulty = [case for case in cases if case["fault"] not in HEALTHY]
    right = sum(case["right"] for case in faulty)
    named = [case["line"] for case in faulty if case.get("line") is not None]
    quiet = [case for case in cases if case["fault"] in HEALTHY]
    shares = f"Cause and culprits right: {right} of {len(faulty)}. Line named: {sum(named)} of "
    shares += f"{len(named)}. Healthy runs: {len(quiet)}, with an alarm: "
    shares += f"{sum(case['alarm'] for case in quiet)}."
    if num_ended:
        shares += f" Jobs that ended before or during the look, not counted: {num_ended}."
    return "\n".join([*lines, "", shares])


def _cell(cases: list[Case]) -> str:
    if not cases:
        return "-"
    wrong = [
        f"x{one['ranks']}: {one.get('cause')} {one.get('culprits', '')}".strip()
        for one in cases
        if not one["right"]
    ]
    lines = [one["line"] for one in cases if one.get("line") is not None]
    text = f"{len(cases) - len(wrong)} of {len(cases)}"
    text += f", line {sum(lines)} of {len(lines)}" if lines else ""
    return text + (f" ({'; '.join(wrong)})" if wrong else "")


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
            str(Path(__file__).with_name("unmodified_steps.py")), kind,
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
    run = commands.add_parser("run")
    run.add_argument("--out", required=True)
    run.add_argument("--scripts", type=lambda text: text.split(","), default=_SCRIPTS)
    run.add_argument("--faults", type=lambda text: text.split(","), default=tuple(CAUSES))
    run.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=(2, 4))
    run.add_argument("--seconds", type=float, default=280.0)
    run.add_argument("--healthy", type=int, default=0)
    run.add_argument("--attach", action="store_true")
    run.add_argument("--keep", type=Path, help="keeps the run directories of wrong verdicts")
    run.set_defaults(act=_measure)
    table = commands.add_parser("table")
    table.add_argument("out", type=Path)
    table.add_argument("--into", type=Path)
    table.set_defaults(act=lambda args: write_table(args.out, args.into))
    overhead = commands.add_parser("overhead")
    overhead.add_argument("--runs", type=int, default=30)
    overhead.set_defaults(act=_overhead)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = _parse()
    parsed.act(parsed)
