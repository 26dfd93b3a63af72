"""Measure the speed of `fr-analyze`, compared with torch's own analyzer if that can finish.

    python -m benchmarks.analysis.scale   # 64, 256 and 1024 ranks, both formats
    python -m benchmarks.analysis.scale --ranks 16384 --formats echelon
    python -m benchmarks.analysis.scale --torch-ranks 64,256    # where torch's analyzer runs too
    python -m benchmarks.analysis.scale --sets tests/data/torch_dumps    # on recorded dumps

Creates folders of dumps (2000 operations per rank over 3 groups: the world, groups of 8 neighbors,
and groups across them; one rank hangs), analyses each in a fresh process, and prints a table of
wall time and peak memory. Each figure is the median of `--repeat` runs. The verdict of each run is
checked. Folders are removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.recorder.format.schema import (
    OPERATION,
    SPAN,
    Group,
    HostFacts,
    Identity,
    Live,
    Record,
    Signature,
    State,
)
from echelon.recorder.read.dump import write_dump

NEIGHBORS = 8
START_NS = 10**12
SITES = ["/srv/job/train.py:20 backward", "/srv/job/train.py:31 gather", "/srv/job/train.py:44 log"]
SHAPES = [(1024, 1024), (4096,), (1,)]


@dataclass(frozen=True)
class Plan:
    """A world and the calls of its ranks."""

    ranks: int
    operations: int
    culprit: int

    def groups(self, rank: int) -> list[Group]:
        """Return the rank's three groups: the world, its neighbors, and the group across them."""
        first = rank - rank % NEIGHBORS
        near = tuple(range(first, min(first + NEIGHBORS, self.ranks)))
        across = tuple(range(rank % NEIGHBORS, self.ranks, NEIGHBORS))
        return [
            Group("world", tuple(range(self.ranks))),
            Group(f"tp{rank // NEIGHBORS}", near),
            Group(f"dp{rank % NEIGHBORS}", across),
        ]

    def calls(self, rank: int) -> int:
        """Return the number of operations that the rank began: one fewer for the culprit."""
        return self.operations - (1 if rank == self.culprit else 0)

    @property
    def last_group(self) -> int:
        """The group of the last operation, in which all ranks wait."""
        return (self.operations - 1) % 3


# ---- echelon's dumps ----


def write_ours(plan: Plan, folder: Path) -> None:
    """Write one echelon dump per rank, and the launcher's files."""
    for rank in range(plan.ranks):
        write_dump(our_record(plan, rank), folder / f"rank_{rank}")
    incident = {"format": 1, "kind": "stall", "number": 0, "attempt": 0, "world_size": plan.ranks}
    (folder / "incident.json").write_text(json.dumps(incident))


def our_record(plan: Plan, rank: int) -> Record:
    """Return one rank's record; the culprit hangs in its own code."""
    count = plan.calls(rank)
    index = np.arange(count)
    rows = np.zeros(count, OPERATION)
    rows["record"] = index
    rows["sequence"] = index // 3
    rows["p2p_sequence"] = -1
    rows["created_mono_ns"] = START_NS + index * 1_000_000 + rank
    rows["started_mono_ns"] = rows["created_mono_ns"] + 1000
    rows["completed_mono_ns"] = rows["created_mono_ns"] + 400_000
    rows["step"] = index // 30
    rows["num_bytes"] = 4096
    rows["group"] = index % 3
    rows["operation"] = 1 + index % 2
    rows["signature"] = index % 3
    rows["reduce_op"] = 3
    rows["site"] = 4 + index % 3
    rows["root"] = rows["peer"] = rows["tag"] = rows["coalesced"] = -1
    rows["state"] = State.COMPLETED
    if rank != plan.culprit:
        rows["state"][-1] = State.STARTED
        rows["completed_mono_ns"][-1] = 0
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/srv/job/train.py", line 88 in read\n'
        '  File "/srv/job/train.py", line 151 in <module>\n'
    )
    now = START_NS + plan.operations * 1_000_000 + 60 * 10**9
    live = [0] * Live.NUM_WORDS
    live[Live.HEARTBEAT_MONO_NS] = now
    return Record(
        path="",
        identity=Identity(rank=rank, world_size=plan.ranks, boot_id=str(rank // NEIGHBORS),
                          clock_error_ns=20_000),
        operations=rows,
        spans=np.zeros(0, SPAN),
        open_spans=np.zeros(0, SPAN),
        strings=["", "all_reduce", "all_gather", "sum", *SITES],
        groups=plan.groups(rank),
        signatures=[Signature("bfloat16", (shape,)) for shape in SHAPES],
        live=tuple(live),
        host=HostFacts(
            alive=True, process_state="S", stacks=stack if rank == plan.culprit else "",
            snapshot_mono_ns=now,
        ),
        dumped_mono_ns=now,
    )  # fmt: skip


# ---- torch's dumps ----


def write_torch(plan: Plan, folder: Path) -> None:
    """Write one pickle per rank as torch's NCCL recorder does, with shared strings and stacks."""
    for rank in range(plan.ranks):
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(torch_dump(plan, rank), protocol=2))


def torch_dump(plan: Plan, rank: int) -> dict[str, object]:
    """Return one rank's dump in torch's format 2.10."""
    groups = plan.groups(rank)
    names = ["0", f"1{rank // NEIGHBORS}", f"2{rank % NEIGHBORS}"]
    pairs = [("0", "default_pg"), (names[1], groups[1].name), (names[2], groups[2].name)]
    stacks = [_torch_stack(line) for line in (20, 31, 44)]
    sizes = [[list(shape)] for shape in SHAPES]
    dtypes = ["BFloat16"]
    operations = ["nccl:all_reduce", "nccl:broadcast"]
    entries = []
    for index in range(plan.calls(rank)):
        done = index < plan.operations - 1
        now = 1_795_000_000_000_000_000 + index * 1_000_000
        kind = index % 3
        entries.append(
            {
                "frames": stacks[kind],
                "record_id": index,
                "pg_id": kind,
                "process_group": pairs[kind],
                "collective_seq_id": index // 3 + 1,
                "p2p_seq_id": 0,
                "op_id": index // 3 + 1,
                "profiling_name": operations[index % 2],
                "time_created_ns": now,
                "input_sizes": sizes[kind],
                "output_sizes": sizes[kind],
                "input_dtypes": dtypes,
                "output_dtypes": dtypes,
                "state": "completed" if done else "started",
                "time_discovered_started_ns": now + 1000,
                "time_discovered_completed_ns": now + 400_000 if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": False,
                "thread_id": "139872",
                "thread_name": "python",
            }
        )
    config = {
        name: {"name": name, "desc": pair[1], "ranks": str(list(group.ranks))}
        for name, pair, group in zip(names, pairs, groups, strict=True)
    }
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": config,
        "pg_status": {},
        "entries": entries,
    }


def _torch_stack(line: int) -> list[dict[str, object]]:
    site = "/usr/lib/python3.11/site-packages/torch/distributed"
    frames = [
        ("all_reduce", f"{site}/distributed_c10d.py", 3245),
        ("wrapper", f"{site}/c10d_logger.py", 83),
        ("backward", "/srv/job/train.py", line),
        ("main", "/srv/job/train.py", 140),
        ("<module>", "/srv/job/train.py", 151),
    ]
    return [{"name": name, "filename": file, "line": number} for name, file, number in frames]


WRITERS: dict[str, Callable[[Plan, Path], None]] = {"echelon": write_ours, "torch": write_torch}

# ---- measuring ----


@dataclass(frozen=True)
class Figure:
    """The time, peak resident memory and output of one run."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    said: str
    finished: bool = True

    def columns(self) -> list[str]:
        """Format time, CPU time and memory; for a stopped run, show the limit as its time."""
        wall = f"{self.wall_s:.1f} s" if self.finished else f"stopped after {self.wall_s:.0f} s"
        return [wall, f"{self.cpu_s:.1f} s", f"{self.peak_bytes / 2**30:.2f} GiB"]


def run(command: list[str], *, timeout_s: float = 900.0) -> Figure:
    """Run a command to its end; measure it and its children."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        pid, status, usage = _wait(process, began + timeout_s)
        wall_s = time.perf_counter() - began
        out.seek(0)
        err.seek(0)
        text = out.read().decode("utf-8", "replace") or err.read().decode("utf-8", "replace")
        assert pid == process.pid, (pid, status)
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        return Figure(wall_s, cpu_s, usage.ru_maxrss * 1024, text, process.returncode != -9)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[int, int, Any]:
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            return pid, status, usage
        if time.perf_counter() > deadline:
            process.kill()
        time.sleep(0.02)


def measure(folder: Path, plan: Plan, repeat: int) -> Figure:
    """Analyze a folder `repeat` times; check each verdict and return the medians."""
    figures = []
    for _ in range(repeat):
        figure = run([sys.executable, "-m", "echelon.analysis", str(folder), "--json"])
        verdict = json.loads(figure.said)["verdict"]
        assert verdict["culprit_ranks"] == [plan.culprit], verdict
        figures.append(figure)
    return Figure(
        statistics.median(figure.wall_s for figure in figures),
        statistics.median(figure.cpu_s for figure in figures),
        max(figure.peak_bytes for figure in figures),
        "right",
    )


def measure_torch_analyzer(folder: Path, timeout_s: float) -> Figure | None:
    """Run torch's analyzer on a folder; return None if torch is not installed."""
    program = shutil.which("torchfrtrace", path=str(Path(sys.executable).parent))
    if program is None:
        return None
    command = [program, str(folder), "--prefix", "nccl_trace_rank_"]
    return run(command, timeout_s=timeout_s)


# ---- recorded sets with known truth ----


def compare_sets(root: Path) -> None:
    """Print the verdicts of echelon and of torch's analyzer on each set of recorded dumps."""
    print("| set | truth | fr-analyze | torch's analyzer |")
    print("|---|---|---|---|")
    ours_right = theirs_right = count = 0
    for path in sorted(root.glob("*/*/truth.json")):
        truth = json.loads(path.read_text())
        wanted = set(truth["culprit_ranks"])
        ours = json.loads(
            run([sys.executable, "-m", "echelon.analysis", str(path.parent), "--json"]).said
        )
        verdict = ours["verdict"] or {"cause": "healthy", "culprit_ranks": []}
        well = truth["cause"] == "healthy"
        right = set(verdict["culprit_ranks"]) == wanted and (verdict["cause"] == "healthy") == well
        theirs, named = _torch_says(path.parent)
        count, ours_right = count + 1, ours_right + right
        theirs_right += named == wanted and (theirs == "no finding") == well
        print(
            f"| {path.parent.relative_to(root)} | {truth['cause']} {_ranks(wanted)} | "
            f"{verdict['cause']} {_ranks(verdict['culprit_ranks'])} | {theirs} |"
        )
    print(f"\nculprits exact: fr-analyze {ours_right} of {count}, torch {theirs_right} of {count}")


def _torch_says(folder: Path) -> tuple[str, set[int] | None]:
    """Run torch's analyzer on a set without its truth; return its verdict and the named ranks."""
    files = [path for path in folder.iterdir() if path.name != "truth.json"]
    prefix = files[0].name.rstrip("0123456789")
    with tempfile.TemporaryDirectory() as copy:
        for file in files:
            shutil.copy(file, copy)
        program = Path(sys.executable).with_name("torchfrtrace")
        if not program.exists():
            return "not installed", None
        command = [str(program), copy, "--prefix", prefix]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    text = done.stdout + done.stderr
    if "Traceback" in text:
        return f"crash: {text.strip().splitlines()[-1][:60]}", None
    named = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}
    for missing in re.findall(r"missing ranks: \{([\d, ]+)\}", text):
        named |= {int(rank) for rank in missing.split(",")}
    if named:
        return f"names {_ranks(named)}", named
    return ("errors, no rank", None) if "has errors" in text else ("no finding", set())


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def main() -> int:
    """Create folders, analyze them, and print the table."""
    options = _parser().parse_args()
    if options.sets is not None:
        compare_sets(options.sets)
        return 0
    print("| ranks | dumps | fr-analyze | CPU | peak | torch's analyzer | CPU | peak |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        for kind in options.formats:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="analyze-") as below:
                print(_line(options, Plan(ranks, options.operations, ranks * 2 // 3), kind, below))
                sys.stdout.flush()
    return 0


def _line(options: argparse.Namespace, plan: Plan, kind: str, below: str) -> str:
    folder = Path(below) / "incident_0"
    folder.mkdir()
    WRITERS[kind](plan, folder)
    ours = measure(folder, plan, options.repeat)
    theirs = None
    if kind == "torch" and plan.ranks in options.torch_ranks:
        theirs = measure_torch_analyzer(folder, options.torch_timeout)
    columns = [
        f"{plan.ranks:,}",
        f"{kind}'s",
        *ours.columns(),
        *(theirs.columns() if theirs else ["-", "-", "-"]),
    ]
    return "| " + " | ".join(columns) + " |"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=_numbers, default=[64, 256, 1024], metavar="N,N,...")
    parser.add_argument("--operations", type=int, default=2000, help="per rank")
    parser.add_argument("--formats", type=lambda t: t.split(","), default=["echelon", "torch"])
    parser.add_argument("--torch-ranks", type=_numbers, default=[64, 256], metavar="N,N,...")
    parser.add_argument("--torch-timeout", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument(
        "--sets", type=Path, metavar="DIR", help="compare verdicts on these instead"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="where the dumps go while measuring (default: temporary)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
