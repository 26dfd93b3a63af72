"""Measure the coordinator's cost for N agents: rendezvous, reports, stall, loss, failure and exit.

    python -m benchmarks.launcher.rendezvous [--agents 16,64,256,1024] [--ranks 8] [--steady 10]

The coordinator, its server and its decisions are the real ones. The agents are simulated, in two
processes, and start no workers. They connect, and report the state of their ranks for `--steady`
seconds. Then three events occur, each followed by a restart: a rank stalls and all agents send
dumps; a node disconnects without a message; a rank fails. Finally, all ranks succeed.

Prints a table: the seconds to connect all agents, the CPU time per agent, the CPU use in the steady
state as a fraction of a core, the growth of memory in that state, and the delay of each decision.
The delay of a stall lasts from the moment at which its limit is reached to the command to collect
dumps. The delay of a loss or failure lasts from the event to the command to stop, less the pause
for victims and the 0.1 s before a node whose connection broke is first probed. A delay ends when
the command has been passed to the last node's connection.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launcher.agents import SECRET, STALL_S, simulate
from benchmarks.runner.place import ROOT

NUM_PROCESSES = 2
_LIMIT_S = 400.0  # beside the steady state


class Measured(NamedTuple):
    """The results of one run."""

    meet_s: float
    cpu_s: float  # of the coordinator's process, until all had met
    share: float  # of a core, in the steady state
    grown_mib: float  # while that lasted
    stall_s: float  # delays of decisions, see above
    loss_s: float
    failure_s: float


_ACTS = {"stall": 0, "lose": 1, "fail": 0}  # what happens, and in which process
_ORDERS = {"stall": "Collect", "lose": "Stop", "fail": "Stop"}  # what the coordinator then sends


def measure(num_agents: int, ranks: int = 8, steady_s: float = 0.0) -> Measured:
    """Run agents that connect and exit; with `steady_s`, add reports and the three events."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    gates, processes = [], []
    share = num_agents // NUM_PROCESSES
    for index in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=simulate, args=(endpoint, index * share, share, ranks, theirs)
        )
        process.start()
        gates.append(ours)
        processes.append(process)
    for gate in gates:
        gate.recv()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(_Host(endpoint, num_agents, Path(folder), gates)) as host,
    ):
        cpu_s, start = _cpu_s(), time.monotonic()
        met_s = max(host.ask("go")) - start
        met_cpu_s = _cpu_s() - cpu_s
        delays = dict.fromkeys(_ACTS, 0.0)
        used = grown = 0.0
        if steady_s:
            host.serve_for(min(2.0, steady_s))  # the first reports come all at once
            cpu_s, start, before = _cpu_s(), time.monotonic(), _rss_mib()
            host.serve_for(steady_s)
            used = (_cpu_s() - cpu_s) / (time.monotonic() - start)
            grown = _rss_mib() - before
            for what, actor in _ACTS.items():
                host.sent.clear()
                due_s = host.ask(what)[actor]
                delays[what] = host.sent[_ORDERS[what]] - due_s
        host.ask("end")
        assert host.has_succeeded
    for process in processes:
        process.join(60)
        assert process.exitcode == 0, process.exitcode
    return Measured(met_s, met_cpu_s, used, grown, *delays.values())


class _Host:
    """The coordinator with its server and store, as the hosting node's agent runs them."""

    def __init__(self, endpoint: str, num_agents: int, folder: Path, gates: list[Any]) -> None:
        from echelon.launcher.control.conf import beat_s
        from echelon.launcher.control.link import Mailbox
        from echelon.launcher.control.server import ControlServer
        from echelon.launcher.coordinator.coordinator import Coordinator
        from echelon.launcher.coordinator.gathering.meeting import StoreProcess
        from echelon.launcher.job.report import Report
        from echelon.launcher.job.rundir import RunDirectory
        from echelon.launcher.options.options import parse
        from echelon.launcher.output.output import Terminal

        options = parse(
            [
                "--nnodes", f"{num_agents - 1}:{num_agents}", "--max-restarts", "9",
                "--stall-timeout", str(STALL_S), "--rdzv-conf", "last_call_timeout=120",
                "--rdzv-endpoint", endpoint, "--no-python", "true",
            ],
            {"ECHELON_SECRET": SECRET.decode()},
        )  # fmt: skip
        self._gates = gates
        self._events: Mailbox[Any] = Mailbox()
        interval_s = beat_s(num_agents, options.conf.lost_after_s)
        self._server = ControlServer(endpoint, SECRET, self._events, beat_s=interval_s)
        self._store = StoreProcess("127.0.0.1", "127.0.0.1", SECRET.decode())
        self.sent: dict[str, float] = {}  # kind of command -> when the last one left
        self._report = Report(job_id="x", world_size=0)
        self._coordinator = Coordinator(
            options, RunDirectory(folder, ""), self._report,
            self._store, self._send, _Silent(Terminal()),
        )  # fmt: skip

    @property
    def has_succeeded(self) -> bool:
        """True if the job has succeeded."""
        return self._report.exit_code == 0

    def _send(self, node: str, command: Any) -> None:
        self.sent[type(command).__name__] = time.monotonic()
        self._server.send(node, command)

    def ask(self, what: str) -> list[Any]:
        """Send a request to both processes; serve until they have answered, return the answers."""
        for gate in self._gates:
            gate.send(what)
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._gates):
            for gate in self._serve([gate for gate in self._gates if gate not in answers], 60.0):
                answers[gate] = gate.recv()
        return [answers[gate] for gate in self._gates]

    def serve_for(self, duration_s: float) -> None:
        """Run the coordinator for `duration_s` seconds."""
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._serve([], left_s)

    def _serve(self, gates: list[Any], at_most_s: float) -> list[Any]:
        """Run the coordinator once, as its agent does; return the gates that have an answer."""
        coordinator, events = self._coordinator, self._events
        wait_s = max(0.0, min(at_most_s, coordinator.deadline_s() - time.monotonic()))
        ready, _, _ = select.select([events.fileno(), *gates], [], [], wait_s)
        for node, event in events.take():
            coordinator.take(node, event)
        coordinator.step()
        return [gate for gate in gates if gate in ready]

    def close(self) -> None:
        """Stop the server and the store."""
        self._coordinator.close()
        self._server.close()
        self._store.close()
        self._events.close()


class _Silent:
    """A terminal that prints nothing."""

    def __init__(self, terminal: Any) -> None:
        self.error_columns = terminal.error_columns

    def say(self, text: str) -> None:
        """Discard a line."""

    def write_error(self, text: str) -> None:
        """Discard error output."""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def in_fresh_process(num_agents: int, ranks: int = 8, steady_s: float = 0.0) -> Measured:
    """Measure in a fresh process, because gRPC's event loop belongs to the first that uses it."""
    call = f"measure({num_agents}, {ranks}, {steady_s})"
    code = f"from benchmarks.launcher.rendezvous import measure; print(*{call})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=_LIMIT_S + steady_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the simulated agents too
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(err)
    return Measured(*map(float, out.split()))


def main() -> None:
    """Measure each number of agents and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", default="16,64,256,1024")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steady", type=float, default=10.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        "| agents | meet, s | us per agent | share of a core | grown, MiB | stall, s | loss, s "
        "| failure, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in [int(n) for n in args.agents.split(",")]:
        runs = [in_fresh_process(size, args.ranks, args.steady) for _ in range(args.repeats)]
        one = Measured(*(statistics.median(values) for values in zip(*runs, strict=True)))
        print(
            f"| {size} | {one.meet_s:.2f} | {one.cpu_s / size * 1e6:.0f} | {one.share:.1%} "
            f"| {one.grown_mib:.1f} | {one.stall_s:.2f} | {one.loss_s:.2f} | {one.failure_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
