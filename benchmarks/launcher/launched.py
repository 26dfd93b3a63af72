"""Run jobs under echelon's launcher or torchrun and observe them from outside, for `run.py`.

Both launchers get the same options, the same worker and the same environment. Workers log their
actions to one file, with stamps of the machine's monotonic clock. Processes are found by a mark in
their environment, which all their children inherit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.01
START_S = 60.0

WORKER = """
import os, signal, subprocess, sys, time
folder, mode, *args = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def tell(what):
    with open(folder + "/events", "a") as file:
        file.write(f"{time.monotonic()} {what} {rank} {world} {restart}\\n")

def wait_for(what, count):
    while open(folder + "/events").read().count(f" {what} ") < count:
        time.sleep(0.01)

def hold():
    tell("ready")
    signal.pause()

def tree(start_new_session=False):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                     start_new_session=start_new_session)
    hold()

def forest():
    tree(start_new_session=True)

def end():
    tell("ready")

def code():
    sys.exit(int(args[0]) if rank == 1 else 0)

def raises():
    if rank == 1:
        raise KeyError("no such column")
    hold()

def stubborn():
    if restart:
        tell("again")
    elif rank == 0:
        wait_for("ready", 1)
        tell("failing")
        sys.exit(3)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hold()

def two_failures():
    tell("ready")
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    if rank in (int(args[0]), int(args[1])):
        late = 0.0 if rank == int(args[0]) else 0.05
        time.sleep(max(0.0, float(open(folder + "/go").read()) + late - time.monotonic()))
        os._exit(1)
    signal.pause()

def gloo():
    import datetime, torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1 and not restart:
        sys.exit(1)
    for _ in range(20):
        dist.all_reduce(x)
    dist.destroy_process_group()

globals()[mode]()
"""


@dataclass(frozen=True, slots=True)
class Event:
    """An action logged by a worker."""

    at_s: float  # monotonic
    what: str
    rank: int
    world_size: int
    restart: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A launcher that has ended; `code` is None if it had to be killed at the limit."""

    code: int | None
    out: str
    err: str


class Agent:
    """One node's launcher, running in the background."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], folder: Path, mark: str
    ) -> None:
        self.folder = folder
        self._mark = mark
        folder.mkdir()
        self._out, self._err = (folder / "agent.out"), (folder / "agent.err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.started_s = time.monotonic()
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, **environ, "BENCH_NODE": mark, "OMP_NUM_THREADS": "1"},
            )

    def pids(self) -> list[int]:
        """Return the pids of all live processes of this node."""
        return marked(self._mark)

    def signal_all(self, number: int) -> None:
        """Signal all processes of this node at once, as if the machine had disappeared."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, limit_s: float) -> Ended:
        """Wait for the launcher to end; kill it after `limit_s`."""
        try:
            code: int | None = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            self.close()
        texts = [path.read_text(errors="replace") for path in (self._out, self._err)]
        return Ended(code, *texts)

    def close(self) -> None:
        """Kill all remaining processes of this node."""
        while self.pids():
            self.signal_all(signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()


class Job:
    """The nodes of one job under one launcher; the first node hosts the rendezvous."""

    def __init__(self, launcher: str, folder: Path, round_number: int) -> None:
        self.launcher = launcher
        self.round = round_number
        self.folder = folder
        self.events_file = folder / "events"
        self.events_file.touch()
        self._mark = uuid.uuid4().hex
        self._worker = folder / "worker.py"
        self._worker.write_text(WORKER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.agents: list[Agent] = []

    @property
    def is_ours(self) -> bool:
        """True if the job runs under `echelon run`."""
        return self.launcher == "ours"

    def start(
        self,
        mode: str,
        *args: str,
        nproc: int = 2,
        nodes: str = "1",
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Agent:
        """Start the next node's launcher with a worker's mode, or with a program in `options`."""
        number = len(self.agents)
        folder = self.folder / f"node_{number}"
        command = [sys.executable, "-m"]
        if self.is_ours:
            command += ["echelon", "run", "--run-dir", str(folder / "run")]
            meeting = ["--node-rank", str(number)]
        else:
            command += ["torch.distributed.run"]
            meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "bench"]
        command += ["--nnodes", nodes, "--nproc-per-node", str(nproc)]
        if nodes != "1":
            command += [*meeting, "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        elif not self.is_ours:
            command += ["--standalone"]
        program = [str(self._worker), str(self.folder), mode, *args] if mode else []
        secret = {"ECHELON_SECRET": "a-secret-of-the-benchmark"}
        agent = Agent(
            [*command, *options, *program],
            {**secret, **(environ or {})},
            folder,
            f"{self._mark}-{number}",
        )
        self.agents.append(agent)
        return agent

    def events(self) -> list[Event]:
        """Return the workers' events so far."""
        lines = [line.split() for line in self.events_file.read_text().splitlines()]
        return [Event(float(w[0]), w[1], *(int(v) for v in w[2:])) for w in lines if len(w) == 5]

    def wait(self, count: int, wanted: Callable[[Event], bool], limit_s: float) -> list[Event]:
        """Wait until workers have logged `count` such events; return them, or [] at the limit."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            found = [event for event in self.events() if wanted(event)]
            if len(found) >= count:
                return found
            time.sleep(POLL_S)
        return []

    def wait_ready(self, count: int) -> None:
        """Wait until `count` workers run.

        Raises:
            RuntimeError: they do not start in time, so nothing can be measured.
        """
        if not self.wait(count, lambda event: event.what == "ready", START_S):
            said = "\n".join((a.folder / "agent.err").read_text() for a in self.agents)
            raise RuntimeError(f"{count} workers did not start under {self.launcher}:\n{said}")

    def report(self) -> Any:
        """Return echelon's report.json."""
        return json.loads((self.agents[0].folder / "run/report.json").read_text())

    def close(self) -> None:
        """Kill all remaining processes."""
        for agent in self.agents:
            agent.close()


@contextlib.contextmanager
def job(launcher: str, round_number: int) -> Iterator[Job]:
    """Create a job's folder; at the end, delete it and kill all processes of the job."""
    with tempfile.TemporaryDirectory(prefix="bench-launcher-") as folder:
        made = Job(launcher, Path(folder), round_number)
        try:
            yield made
        finally:
            made.close()


def marked(mark: str) -> list[int]:
    """Return the pids of the live processes with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"BENCH_NODE={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def seconds_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Wait for a condition; return the seconds that it took, or infinity at the limit."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > limit_s:
            return float("inf")
        time.sleep(POLL_S)
    return time.monotonic() - start_s
