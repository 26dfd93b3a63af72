"""Measure how often `fr-analyze --attach` explains a hang of a job under plain torchrun.

    python -m benchmarks.launcher.attach [--ranks 2 4] [--faults ...] [--json FILE]

Each fault of `attach_job.py` stops rank 1 of a DDP job on Gloo. Once the job hangs, it is examined
from outside. Each row shows whether the reported cause, culprits and line are those of the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from echelon.host.threads import descendants

JOB = Path(__file__).with_name("attach_job.py")
CAUSES = {
    "user": "host_hang",
    "lock": "host_hang",
    "spin": "host_hang",
    "child": "host_hang",
    "file_lock": "host_hang",
    "loader": "data_starvation",
    "loader_worker": "data_starvation",
    "checkpoint": "storage_stall",
    "compile": "compile_stall",
    "store": "store_wait",
    "gil": "gil_hang",
    "frozen": "frozen_process",
    "uneven": "skipped_collective",
    "never_comes": "host_hang",
    "healthy": "",
}
_SETTLE_S = 3.0


def lines_of(fault: str) -> list[str]:
    """Return a fault's lines in the job, such as `attach_job.py:47`; [] if it has none."""
    texts = enumerate(JOB.read_text().splitlines(), 1)
    return [
        f"{JOB.name}:{number}"
        for number, text in texts
        if fault in text.partition("  # ")[2].split(", ")
    ]


class Job:
    """A job under plain torchrun."""

    def __init__(self, fault: str, num_ranks: int) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", f"--nproc-per-node={num_ranks}", str(JOB), fault,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        expected = 0 if fault == "never_comes" else num_ranks
        assert self.process.stdout is not None
        for _ in range(expected):
            assert self.process.stdout.readline(), "the job ended"
        time.sleep(_SETTLE_S if expected else 4 * _SETTLE_S)

    def end(self) -> None:
        """End the launcher and every rank."""
        below = descendants(self.process.pid)  # torchrun gives each rank a session of its own
        self.process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def attach(pid: int, wait_s: float) -> tuple[int, dict[str, object]]:
    """Attach to a job; return the exit code and the verdict."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from echelon.cli import analyze; sys.exit(analyze())",
         "--attach", str(pid), "--json", "--wait", str(wait_s)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def judge(fault: str, code: int, report: dict[str, object]) -> dict[str, object]:
    """Compare a report with the injected fault; return the row."""
    verdict = report.get("verdict") or {}
    assert isinstance(verdict, dict)
    lines = lines_of(fault)
    if fault == "healthy":
        return {"fault": fault, "cause": code == 0, "culprits": code == 0, "line": True,
                "said": verdict.get("summary", report.get("error", ""))}  # fmt: skip
    text = f"{verdict.get('summary')} {verdict.get('next_action')}"
    return {
        "fault": fault,
        "cause": verdict.get("cause") == CAUSES[fault],
        "culprits": verdict.get("culprit_ranks") == [1],
        "line": not lines or any(f"{line} " in text for line in lines),
        "confidence": verdict.get("confidence"),
        "said": f"{verdict.get('cause')}: {verdict.get('summary', report.get('error'))}",
    }


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--faults", nargs="+", default=list(CAUSES))
    parser.add_argument("--wait", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for num_ranks in arguments.ranks:
        for fault in arguments.faults:
            job = Job(fault, num_ranks)
            try:
                row = judge(fault, *attach(job.process.pid, arguments.wait))
            finally:
                job.end()
            row["ranks"] = num_ranks
            rows.append(row)
            marks = " ".join("yes" if row[key] else "NO " for key in ("cause", "culprits", "line"))
            print(f"{num_ranks} {fault:14} {marks} {row['said']!s:.150}", flush=True)
    exact = sum(bool(row["cause"] and row["culprits"] and row["line"]) for row in rows)
    print(f"exact: {exact} of {len(rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
