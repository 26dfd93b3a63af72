"""Reference models under the features of PyTorch 2, each compared with eager mode.

    python -m benchmarks.reference.run                       # 10.65M characters: all rows
    python -m benchmarks.reference.run --model gpt2 --rounds 2 --iterations 3
    python -m benchmarks.reference.run --only eager,inductor --text shakespeare.txt
    python -m benchmarks.reference.run --row eager --row "whole, inductor" --limit 3000
    python -m benchmarks.reference.run --device cuda --model gpt2 --iterations 1000 --batch 8

Every row is measured in separate processes, one per round. The rows of a round run one after
another in random order. A row's ratio is relative to its peer in the same round. The first round
compiles with an empty cache (cold), later rounds with a filled one (warm). Results are kept in
`--out` and not measured again, so an interrupted run can be resumed. A row that took longer than
`--limit` is measured again if the limit is raised. At the end, the table is printed as Markdown,
and written next to `--out` as JSON, with a description of the machine.

On a CPU, a row has one thread, and its iterations are also measured in CPU seconds, which are
reproducible on a shared machine, unlike wall seconds. Ratios and MFU use CPU time on a CPU and wall
time on a GPU. The peak for MFU is the rate that a matrix product of the row's dtype reaches in the
same process.
"""

# ruff: noqa: D103 -- main() reads top-down
from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reference.cases import CASES, Case
from benchmarks.runner.place import ROOT

_HEADING = (
    "| row | iteration s, mean | sigma | wall s, mean | x its peer | MFU | first s, cold | warm "
    "| graphs |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["char", "gpt2", "tiny"], default="char")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=5, help="counted, a round and row")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=0, help="tokens each; 0: the context")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", default="", metavar="FILE", help="default: Python's library")
    parser.add_argument("--only", default="", metavar="WORD,...", help="rows that contain a word")
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="these rows")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds, a row and round")
    parser.add_argument("--out", type=Path, default=Path("reference_models.jsonl"))
    options = parser.parse_args()
    if options.iterations < 1 or options.rounds < 1 or options.batch < 1:
        parser.error("--iterations, --rounds and --batch must be at least 1")
    cases = chosen(options.only, options.row)
    if not cases:
        parser.error("no row has such a name; the rows: " + "; ".join(one.name for one in CASES))
    run(cases, options)
    results = read(options.out, key(options))
    text = table(cases, results, options.device)
    print(text, flush=True)
    kept = {"machine": machine(), "options": key(options), "rows": summaries(cases, results)}
    options.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")


def chosen(words: str, names: list[str]) -> list[Case]:
    """Return the rows with these names or with a word in their names; all rows if none is given.

    A row has a ratio only if its peer is chosen too.
    """
    parts = [word for word in words.split(",") if word]
    every = not parts and not names
    return [
        case
        for case in CASES
        if every or case.name in names or any(part in case.name for part in parts)
    ]


def key(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters on which a measurement depends, apart from its row."""
    names = ("model", "device", "iterations", "batch", "length", "threads", "text")
    return {name: getattr(options, name) for name in names}


def run(cases: list[Case], options: argparse.Namespace) -> None:
    """Measure the rows that are not yet in the results file."""
    cache = options.out.with_suffix(".cache")
    for number in range(options.rounds):
        order = list(cases)
        random.Random(options.seed + number).shuffle(order)
        for case in order:
            found = read(options.out, key(options)).get(case.name, {})
            failed = any(is_final(one, options.limit) for one in found.values())
            if failed or "error" not in found.get(number, {"error": "not measured"}):
                continue
            result = measure(case, key(options), cache / case.name.replace(" ", "_"), options.limit)
            if result is None:
                sys.stderr.write(f"{number} {case.name}: killed by a signal; not kept\n")
                continue
            line = {"case": case.name, "round": number, "options": key(options), **result}
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sys.stderr.write(f"{number} {case.name}: {result.get('error', 'measured')}\n")


def is_final(result: dict[str, Any], limit_s: float) -> bool:
    """Return whether repeating a row is pointless; a timeout may not recur with a longer limit."""
    return "error" in result and result.get("limit_s", limit_s) >= limit_s


def measure(
    case: Case, options: dict[str, Any], cache: Path, limit_s: float
) -> dict[str, Any] | None:
    """Run one row in a fresh process; return None if a signal killed it, which is inconclusive."""
    order = json.dumps({"case": case.to_dict(), "options": options})
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(options["threads"]),
        "TORCHINDUCTOR_CACHE_DIR": str(cache.resolve()),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in this process, whose time is counted
    }
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.reference.measure", order]
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                program, stdout=subprocess.PIPE, stderr=errors, env=environ, timeout=limit_s,
                cwd=ROOT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit_s:.0f} s", "limit_s": limit_s}
        if done.returncode < 0:
            return None
        lines = done.stdout.decode().strip().splitlines()
        if done.returncode or not lines:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            return {"error": f"exit code {done.returncode}: {' '.join(last)}"[:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def read(path: Path, options: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return results by row and round, ignoring those of other options and truncated lines."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the run was killed while it wrote
        if line["options"] == options:
            found.setdefault(line["case"], {})[line["round"]] = line
    return found


def summaries(cases: list[Case], results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case.name: summary(case, results) for case in cases if case.name in results}


def summary(case: Case, results: dict[str, Any]) -> dict[str, Any]:
    """Return the means over all iterations of all rounds; the ratio is the mean over rounds."""
    rounds = results[case.name]
    failed = [one["error"] for one in rounds.values() if "error" in one]
    if failed:
        return {"error": failed[0]}
    on_cpu = next(iter(rounds.values()))["options"]["device"] == "cpu"
    unit = "cpu_s" if on_cpu else "wall_s"
    times = [each for one in rounds.values() for each in one[unit]]
    walls = [each for one in rounds.values() for each in one["wall_s"]]
    ratios = [
        statistics.mean(one[unit]) / statistics.mean(peer[unit])
        for number, one in rounds.items()
        if unit in (peer := results.get(case.peer, {}).get(number, {}))
    ]
    mfu = [one["flops"] / statistics.mean(one[unit]) / one["peak"] for one in rounds.values()]
    first = "first_cpu_s" if unit == "cpu_s" else "first_s"
    later = [one[first] for number, one in rounds.items() if number > 0]
    return {
        "mean_s": statistics.mean(times),
        "sigma_s": statistics.stdev(times) if len(times) > 1 else 0.0,
        "wall_mean_s": statistics.mean(walls),
        "ratio": statistics.mean(ratios) if ratios else None,
        "mfu": None if case.lengths == "varied" else statistics.mean(mfu),
        "cold_s": rounds[0][first] if 0 in rounds else None,
        "warm_s": statistics.mean(later) if later else None,
        "graphs": max(one["graphs"] for one in rounds.values()),
        "num_iterations": len(times),
    }


def table(cases: list[Case], results: dict[str, Any], device: str) -> str:
    """Return the table as Markdown; a row that torch cannot run shows its error."""
    facts = " · ".join(f"{name}: {value}" for name, value in machine().items())
    unit = "processor seconds" if device == "cpu" else "wall seconds"
    lines = [f"{facts} · iteration s in {unit}", "", _HEADING]
    for name, row in summaries(cases, results).items():
        if "error" in row:
            lines.append(f"| {name} | {row['error'].replace('|', '/')} | | | | | | | |")
            continue
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        cold, warm, ratio = (_number(row[which]) for which in ("cold_s", "warm_s", "ratio"))
        lines.append(
            f"| {name} | {row['mean_s']:.3f} | {row['sigma_s']:.3f} | {row['wall_mean_s']:.3f} "
            f"| {ratio} | {mfu} | {cold} | {warm} | {row['graphs']} |"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def machine() -> dict[str, str]:
    import torch

    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    facts["processor"] = f"{len(models)} x {models[0] if models else platform.processor()}"
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    facts["load"] = f"{os.getloadavg()[0]:.0f}"
    return facts


if __name__ == "__main__":
    main()
