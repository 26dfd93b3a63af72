"""Run one job of the campaign under one launcher, on its own hosts, and collect its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.campaign.plan import KINDS, SAVE_EVERY, STEP_S, Plan
from benchmarks.runner.place import ROOT
from tests.support.hosts import Host, hosts

LAUNCHERS = ("echelon", "torchrun")
WITH_STANDBYS = "echelon-standby"  # echelon with a standby for each rank
MAX_RESTARTS = 12
STALL_S = 3.0  # echelon's --stall-timeout; under torchrun the timeout of each collective
_GRACE_S = 5
_CUT_S = 10.0
_SPARE_AFTER_S = 8.0  # so that the spare node is the spare one under both launchers
_POLL_S = 0.05
# As docs/deploy.md recommends: after an outage, TCP retransmits within a second (Linux 6.15).
_TCP = {"net.ipv4.tcp_rto_max_ms": 1000, "net.ipv4.tcp_retries2": 60}
_RANK = Path(__file__).with_name("rank.py")


def run_job(plan: Plan, launcher: str, folder: Path) -> dict[str, Any]:
    """Run one job to its end, or to its time limit; return its record."""
    folder.mkdir(parents=True)
    written = {**asdict(plan), "step_s": STEP_S, "save_every": SAVE_EVERY, "stall_s": STALL_S}
    (folder / "plan.json").write_text(json.dumps(written))
    with hosts(plan.num_nodes) as machines:
        for machine in machines:
            _set_up_tcp(machine)
        job = _Job(plan, launcher, folder, machines)
        try:
            job.run()
        finally:
            job.close()
    return job.record()


class _Job:
    def __init__(self, plan: Plan, launcher: str, folder: Path, machines: list[Host]) -> None:
        self._plan, self._launcher, self._folder = plan, launcher, folder
        self._machines = machines
        self._agents: list[subprocess.Popen[bytes]] = []
        self._gone = set[int]()  # nodes that a fault took
        self._heal_at_s = float("inf")
        self._hit = set[int]()
        self._began_s = time.time()
        self._ended_s = 0.0
        self._load = os.getloadavg()[0]

    def run(self) -> None:
        due_s = self._began_s + 3 * self._plan.num_steps * STEP_S + 180
        while time.time() < due_s:
            if len(self._agents) < (2 if time.time() < self._began_s + _SPARE_AFTER_S else 9):
                self._start_next()
            self._strike()
            if self._is_over():
                break
            time.sleep(_POLL_S)
        self._ended_s = time.time()

    def _start_next(self) -> None:
        index = len(self._agents)
        if index >= len(self._machines):
            return
        with (self._folder / f"node_{index}.log").open("wb") as log:
            self._agents.append(
                subprocess.Popen(
                    self._machines[index].command(sys.executable, "-m", *self._command(index)),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=self._environ(index), cwd=self._folder,
                )
            )  # fmt: skip

    def _command(self, index: int) -> list[str]:
        host = self._machines[0].address
        meeting = [f"--rdzv-endpoint={host}:29400", "--nproc-per-node=2", "--nnodes=2:2"]
        common = [*meeting, f"--max-restarts={MAX_RESTARTS}"]
        script = [str(_RANK), str(self._folder), str(self._folder / "plan.json")]
        if self._launcher == "torchrun":
            local = f"--local-addr={self._machines[index].address}"
            # Its own guess compares host names, which all namespaces share.
            is_host = f"--rdzv-conf=is_host={int(index == 0)},join_timeout=600,timeout=120"
            c10d = ["--rdzv-backend=c10d", "--rdzv-id=campaign", is_host, local]
            return ["torch.distributed.run", *common, *c10d, "--monitor-interval=0.1", *script]
        watch = [f"--stall-timeout={STALL_S}", "--on-stall=restart", f"--node-rank={index}"]
        spare = [f"--spares={self._plan.num_nodes - 2}", f"--shutdown-timeout={_GRACE_S}"]
        if self._launcher == WITH_STANDBYS:
            spare.append("--standby=2")
        run_dir = f"--run-dir={self._folder / f'run_{index}'}"
        return ["echelon", "run", *common, *watch, *spare, run_dir, *script]

    def _environ(self, index: int) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CAMPAIGN_NODE": str(index),
            "ECHELON_SECRET": "a-secret-of-the-campaign",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_GRACE_S),
        }

    def _strike(self) -> None:
        """Inject the faults that ranks cannot inject themselves."""
        for number, fault in enumerate(self._plan.faults):
            struck = self._folder / f"struck_{number}"
            if number not in self._hit and struck.exists():
                self._hit.add(number)
                self._hit_node(fault.kind, int(struck.read_text().split()[2]))
        if time.time() >= self._heal_at_s:
            self._heal_at_s = float("inf")
            for index, machine in enumerate(self._machines):
                if index not in self._gone:
                    machine.heal()

    def _hit_node(self, kind: str, node: int) -> None:
        if kind == "cut":
            self._machines[node].cut()
            self._heal_at_s = time.time() + _CUT_S
        elif kind == "cut_for_good":
            self._gone.add(node)
            self._machines[node].cut()
        elif kind == "node_killed":
            self._gone.add(node)
            _kill_all(self._machines[node])
        elif kind == "preempted":
            self._gone.add(node)
            os.kill(_launcher_of(self._agents[node]), signal.SIGTERM)
        elif kind == "bad_node":
            self._gone.add(node)  # it may live on, without a place in the world

    def _is_over(self) -> bool:
        """Return whether the job is over; spare nodes and nodes that are cut off may still wait."""
        if len(self._agents) < len(self._machines):
            return self._agents[0].poll() is not None
        if self._agents[0].poll() is None:
            return False
        return all(
            agent.poll() is not None or index in self._gone
            for index, agent in enumerate(self._agents)
        )

    def close(self) -> None:
        """Kill all remaining processes on the job's hosts."""
        for machine in self._machines:
            _kill_all(machine)
        for agent in self._agents:
            agent.wait(60)

    def record(self) -> dict[str, Any]:
        """Return the campaign's record of this job."""
        steps = [line.split() for line in _lines(self._folder / "steps.log")]
        made = [one for one in steps if one[1] == "step"]
        done = [(float(at), int(step)) for at, _, step in made]
        code = self._agents[0].poll()
        return {
            "plan": asdict(self._plan),
            "launcher": self._launcher,
            "load": [self._load, os.getloadavg()[0]],
            "wall_s": self._ended_s - self._began_s,
            "exit_code": code,
            "finished": any(what == "end" for _, what, *_ in steps) and code == 0,
            "num_done": len({step for _, step in done}),
            "num_attempts": sum(what == "begin" for _, what, *_ in steps),
            "begins_s": [float(at) - self._began_s for at, what, *_ in steps if what == "begin"],
            "faults": [one for one in self._faults(done) if one is not None],
            **self._own_account(),
        }

    def _faults(self, done: list[tuple[float, int]]) -> Iterator[dict[str, Any] | None]:
        for number, fault in enumerate(self._plan.faults):
            told = _lines(self._folder / f"struck_{number}")
            if not told:
                yield None
                continue
            at, reached = float(told[0].split()[0]), int(told[0].split()[1])
            new = min((when for when, step in done if step >= reached and when > at), default=None)
            yield {
                "kind": fault.kind,
                "at_s": at - self._began_s,
                "recovered_s": None if new is None else new - at,
                **asdict(KINDS[fault.kind]),
            }

    def _own_account(self) -> dict[str, Any]:
        """Return echelon's own account of the job, from `echelon report` and report.json."""
        run = self._folder / "run_0"
        if not (run / "report.json").exists():
            return {}
        report = json.loads((run / "report.json").read_text())
        told = subprocess.run(
            [sys.executable, "-m", "echelon", "report", "--json", str(run)],
            capture_output=True, text=True, env=self._environ(0), timeout=120, check=False,
        )  # fmt: skip
        with contextlib.suppress(ValueError):
            report["account"] = json.loads(told.stdout)
        phases = list(_phases(json.loads((run / "goodput.json").read_text())))
        keys = ("decisions", "restarts", "ended_by", "account", "stopped", "error")
        return {"report": {key: report[key] for key in keys if key in report}, "phases": phases}


def _set_up_tcp(machine: Host) -> None:
    """Change one host's TCP settings, if this kernel has them."""
    if not Path("/proc/sys/net/ipv4/tcp_rto_max_ms").exists():
        return
    command = machine.command("sysctl", "-qw", *(f"{name}={value}" for name, value in _TCP.items()))
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _phases(account: dict[str, Any]) -> Iterator[list[float]]:
    """Yield each restart's times from the failure to the end, the next start and its first step."""
    for one, other in pairwise(account["attempts"]):
        laps = [run["laps"][0] for run in other["runs"].values() if run["laps"]]
        if one["failed_ns"] is not None and one["ended_ns"] is not None and laps:
            first_ns = min(lap[2] for lap in laps)
            times = (one["failed_ns"], one["ended_ns"], other["began_ns"], first_ns)
            yield [round((b - a) / 1e9, 3) for a, b in pairwise(times)]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _kill_all(machine: Host) -> None:
    """Kill all processes of a host, including those that they are about to start."""
    for _ in range(20):
        listed = subprocess.run(
            ["ip", "netns", "pids", machine.name], capture_output=True, text=True, check=False
        )
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _launcher_of(agent: subprocess.Popen[bytes]) -> int:
    """Return the pid of a node's launcher: `ip netns exec` replaces its own process with it."""
    return agent.pid
