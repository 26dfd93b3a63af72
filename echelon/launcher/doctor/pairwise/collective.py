"""Run `echelon.planner.pairs` under a time limit, with the options of the planned job.

The measurement uses a temporary run directory. If the run fails, the directory is not removed, and
the error message contains its path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from echelon.launcher.control.endpoint import Rendezvous
from echelon.launcher.doctor.pairwise.schedule import rounds

LIMIT_S = 120.0
_STALL_S = 30
_END_S = 15.0  # for a launcher to end after a stop request
_CLOSED_S = 3.0
_POLL_S = 0.05
_MOST_SAID = 300
_TEXTS = (
    "rdzv_endpoint", "rdzv_secret_file", "rdzv_cert", "rdzv_key", "rdzv_ca", "master_addr", "bind",
)  # fmt: skip


def measure_collective(args: argparse.Namespace, meeting: Rendezvous | None) -> dict[str, Any]:
    """Measure an all-reduce across the job's ranks; return the results, or {"error": reason}.

    On a single node, the pairs of ranks are also measured. Blocks for at most about two minutes.

    Args:
        args: the options of `echelon doctor`.
        meeting: the rendezvous of the nodes; None for a single-node job.
    """
    if meeting is not None and not meeting.is_host:
        _wait_until_closed(meeting)
    folder = Path(tempfile.mkdtemp(prefix="echelon-doctor-"))
    said, code = _run(_command(args, folder), LIMIT_S)
    try:
        found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    except (OSError, ValueError):
        found = {}
    if code == 0 and found:
        shutil.rmtree(folder, ignore_errors=True)
        return found
    why = _why(said, folder / "run")
    return {"error": f"{why} (exit code {code}); see {folder}"}


def _command(args: argparse.Namespace, folder: Path) -> list[str]:
    backend = [args.backend] if args.backend else []
    has_nodes = args.rdzv_endpoint or args.master_addr  # of several, pairs were measured before
    pairs = [] if has_nodes else rounds(args.nproc_per_node)
    return [
        sys.executable, "-m", "echelon", "run", *run_options(vars(args)),
        "--run-dir", str(folder / "run"), "--max-restarts", "0", "--stall-timeout", str(_STALL_S),
        "--on-stall", "stop",
        "-m", "echelon.planner.pairs", str(folder / "figures.json"), json.dumps(pairs), *backend,
    ]  # fmt: skip


def run_options(args: Mapping[str, Any]) -> list[str]:
    """Return the `echelon run` options for the nodes and ranks that `args` specifies."""
    found = ["--nproc-per-node", str(args["nproc_per_node"])]
    if not args["rdzv_endpoint"] and not args["master_addr"]:
        return [*found, "--standalone"]
    found += ["--nnodes", str(args["nnodes"][1])]
    for name in _TEXTS:
        if args[name]:
            found += [f"--{name.replace('_', '-')}", str(args[name])]
    if args["node_rank"] >= 0:
        found += ["--node-rank", str(args["node_rank"])]
    if args["master_port"]:
        found += ["--master-port", str(args["master_port"])]
    if args["rdzv_conf"]:
        pairs = (f"{name}={value}" for name, value in args["rdzv_conf"].items())
        found += ["--rdzv-conf", ",".join(pairs)]
    return found


def _run(command: list[str], limit_s: float) -> tuple[str, int]:
    """Run a launcher for up to `limit_s` seconds; return its output and exit code."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    with _ended(process):
        try:
            return process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
        return f"the ranks did not end within {limit_s:g} s", 124


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a launcher when the `with` block ends; the launcher's guard then kills the ranks."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _why(said: str, run: Path) -> str:
    """Return why a run failed: the verdict's summary, or else the most informative output line.

    Args:
        said: the output of the launcher.
        run: the run directory.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        report = json.loads((run / "report.json").read_text())
        return str(report["incidents"][-1]["verdict"]["summary"])[:_MOST_SAID]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("echelon: failure:", "echelon: stall:"))]
    return (told or lines[-1:] or ["the ranks ended"])[0][:_MOST_SAID]


def _wait_until_closed(meeting: Rendezvous) -> None:
    """Wait until the hosting node's `echelon doctor` closes the port that the launcher needs.

    Waits for at most about 3 s.
    """
    deadline_s = time.monotonic() + _CLOSED_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline_s:
            socket.create_connection((meeting.host, meeting.port), timeout=_CLOSED_S).close()
            time.sleep(_POLL_S)
