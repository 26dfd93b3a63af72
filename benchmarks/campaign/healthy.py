"""Run healthy jobs for hours, and count the launcher's alarms, all of which are false.

    python -m benchmarks.campaign.healthy --jobs 5 --minutes 60 --keep campaign/healthy

The jobs run `healthy_rank.py` at the same time, at a low priority, alongside other work on the
machine. They are idle for most of their time, so many of them fit on one machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import ROOT

_RANK = Path(__file__).with_name("healthy_rank.py")
_NICE = 19
_POLL_S = 5.0
_END_S = 900.0  # for start, compilation and end on a busy machine, beyond the job's minutes
_COLUMNS = [
    ("job", "left"), ("ranks", "right"), ("minutes", "right"), ("steps", "right"),
    ("pauses, the longest", "right"), ("incidents", "right"), ("of them withdrawn", "right"),
    ("restarts", "right"), ("warnings", "right"), ("exit code", "right"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of healthy job.

    Attributes:
        program: the kind's name in `healthy_rank.py`.
        nodes: the number of launchers.
        ranks: the number of ranks per launcher.
        options: the options of `echelon run`.
        scale: the factor by which pauses are shortened.
    """

    program: str
    nodes: int = 1
    ranks: int = 3
    options: tuple[str, ...] = ()
    scale: float = 1.0


_STRICT = ("--max-restarts=3", "--on-stall=restart")
KINDS = {
    "marked by spans": Kind(program="marked", options=_STRICT),
    "unmarked": Kind(program="unmarked", ranks=4, options=_STRICT),
    "unmodified torch, compiled": Kind(program="torch", ranks=2, options=_STRICT),
    "two nodes": Kind(program="marked", nodes=2, ranks=2, options=_STRICT),
    "stall timeout of 20 s": Kind(
        program="marked", options=(*_STRICT, "--stall-timeout=20"), scale=1 / 3
    ),
    "torch on echelon's groups": Kind(
        program="torch_groups", ranks=2, options=(*_STRICT, "--torch-backend=echelon")
    ),
}  # fmt: skip


@dataclass
class Job:
    """One running job."""

    name: str
    kind: Kind
    seed: int
    folder: Path
    began_s: float
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, minutes: float) -> None:
        """Start the job's launchers."""
        self.folder.mkdir(parents=True)
        port = _free_port()
        for node in range(self.kind.nodes):
            command = [sys.executable, "-m", "echelon", "run", *self.kind.options]
            command += [f"--nproc-per-node={self.kind.ranks}", f"--run-dir={self._run_dir(node)}"]
            if self.kind.nodes > 1:
                command += [f"--nnodes={self.kind.nodes}", f"--node-rank={node}"]
                command += [f"--rdzv-endpoint=127.0.0.1:{port}"]
            script = [self.kind.program, str(self.seed), str(minutes), str(self.kind.scale)]
            with self._log(node).open("wb") as log:
                self.agents.append(
                    subprocess.Popen(
                        [*command, str(_RANK), *script, str(self.folder / "told.json")],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environ(),
                    )
                )  # fmt: skip

    def wait(self, due_s: float) -> None:
        """Wait for the job to end; terminate it after `due_s`."""
        for agent in self.agents:
            try:
                agent.wait(max(1.0, due_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.terminate()
                agent.wait(60)

    def record(self) -> dict[str, Any]:
        """Return the launcher's report and the program's own account."""
        report = _read(self._run_dir(0) / "report.json")
        lines = [
            line
            for node in range(self.kind.nodes)
            for line in self._log(node).read_text(errors="replace").splitlines()
        ]
        return {
            "name": self.name,
            "seed": self.seed,
            "ranks": self.kind.nodes * self.kind.ranks,
            "minutes": (time.monotonic() - self.began_s) / 60,
            "exit_codes": [agent.returncode for agent in self.agents],
            **(_read(self.folder / "told.json") or {"steps": None, "pauses": {}, "longest_s": 0}),
            "incidents": report.get("incidents", []),
            "restarts": max(report.get("attempts", 0) - 1, 0),
            "warnings": [
                line.replace(str(self.folder), "JOB") for line in lines if _is_warning(line)
            ],
        }

    def _run_dir(self, node: int) -> Path:
        return self.folder / f"run_{node}"

    def _log(self, node: int) -> Path:
        return self.folder / f"node_{node}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; return 1 if any of them failed or caused an alarm."""
    options = _options(arguments)
    os.nice(max(0, _NICE - os.nice(0)))
    conditions, loads = Conditions(peers=("torch",)), list[float]()
    root = Path(tempfile.mkdtemp(prefix="healthy-"))
    print(f"folders: {root}", file=sys.stderr, flush=True)
    names = list(KINDS)
    first = options.seed or 0
    jobs = [
        Job(name, KINDS[name], first + number, root / f"job_{number}", time.monotonic())
        for number in range(options.jobs)
        for name in [names[(first + number) % len(names)]]
    ]
    for job in jobs:
        job.start(options.minutes)
    due_s = time.monotonic() + options.minutes * 60 + _END_S
    while time.monotonic() < due_s and any(_runs(job) for job in jobs):
        loads.append(os.getloadavg()[0])
        time.sleep(_POLL_S)
    records = []
    for job in jobs:
        job.wait(due_s)
        records.append(job.record())
    rows = [_row(record) for record in records]
    load = {"mean": sum(loads) / len(loads), "largest": max(loads)} if loads else {}
    finish(options, conditions, _COLUMNS, rows, {"jobs": records, "load": load})
    is_whole = all(one["exit_codes"] == [0] * len(one["exit_codes"]) for one in records)
    alarms = sum(len(one["incidents"]) + one["restarts"] for one in records)
    if not options.leave and is_whole and not alarms:
        shutil.rmtree(root)
    return 0 if is_whole and not alarms else 1


def _runs(job: Job) -> bool:
    return any(agent.poll() is None for agent in job.agents)


def _row(record: dict[str, Any]) -> list[str]:
    pauses = f"{sum(record['pauses'].values())}, {record['longest_s']:.0f} s"
    withdrawn = sum(one["withdrawn"] for one in record["incidents"])
    return [
        record["name"], str(record["ranks"]), f"{record['minutes']:.0f}", str(record["steps"]),
        pauses, str(len(record["incidents"])), str(withdrawn), str(record["restarts"]),
        str(len(record["warnings"])), ", ".join(map(str, record["exit_codes"])),
    ]  # fmt: skip


def _is_warning(line: str) -> bool:
    """Return whether a line of the launcher's output is a warning."""
    return "echelon: " in line and not line.startswith(("echelon: run directory",))


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _environ() -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "ECHELON_SECRET": "a-secret-of-the-benchmark",
    }  # fmt: skip


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def _options(arguments: Sequence[str] | None) -> Any:
    made = parser(__doc__, rounds=None)
    made.add_argument("--jobs", type=int, default=len(KINDS), help="jobs at the same time")
    made.add_argument("--minutes", type=float, default=60, help="that each trains")
    made.add_argument("--leave", action="store_true", help="leave the jobs' folders")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
