"""Run one training of the campaign, on one host or several, and return its record."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.losses.plan import (
    HOSTS,
    LOST_AFTER_S,
    SAVE_EVERY,
    STALL_S,
    TORCHRUN,
    TOTAL,
    Fault,
    Plan,
)
from benchmarks.losses.preloaded import start
from benchmarks.losses.recovery import Loss, lines_of, recovery, struck_by
from benchmarks.runner.place import child_environ
from tests.support.hosts import Host, hosts

Record = dict[str, Any]
_LIMIT_S = 600.0
_POLL_S = 0.05
_LEFT_S = 30.0
_TAIL = 4000  # characters of each node's output, where a training failed


def train(plan: Plan, folder: Path) -> Record:
    """Run one training; return its record, with its result and the time of each recovery."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(hosts(plan.num_nodes)) if plan.layout == HOSTS else []
        job = _Job(plan, folder, machines)
        stack.callback(job.close)
        job.run()
    return job.record()


class _Job:
    def __init__(self, plan: Plan, folder: Path, machines: Sequence[Host]) -> None:
        self._plan, self._folder, self._machines = plan, folder, machines
        self._nodes: list[BaseProcess | subprocess.Popen[bytes]] = []
        self._left: list[int] = []  # processes that survive their launchers

    def run(self) -> None:
        """Start the nodes, and wait until they end or reach the time limit."""
        cut = [one.command_to_cut() for one in self._machines]
        written = {**asdict(self._plan), "total": TOTAL, "save_every": SAVE_EVERY, "cut": cut}
        (self._folder / "plan.json").write_text(json.dumps(written))
        for node in range(self._plan.num_nodes):
            self._start(node)
        due_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < due_s and any(_code(node) is None for node in self._nodes):
            time.sleep(_POLL_S)
        self._left = [pid for one in self._machines for pid in _left(one)]

    def _start(self, node: int) -> None:
        environ = child_environ(OMP_NUM_THREADS="1", ECHELON_SECRET="a-secret-of-this-job")
        path = self._folder / f"node_{node}.log"
        if self._plan.layout == TORCHRUN:
            self._nodes.append(_torchrun(self._command(node), environ, path))
        else:
            namespace = self._machines[node].name if self._machines else ""
            self._nodes.append(start(self._command(node), environ, path, namespace))
        (self._folder / f"node_{node}.pid").write_text(str(self._nodes[-1].pid))

    def _command(self, node: int) -> list[str]:
        script = [str(Path(__file__).with_name("rank.py")), str(self._folder)]
        size = f"--nproc-per-node={self._plan.ranks_per_node}"
        if self._plan.layout == TORCHRUN:
            return ["--standalone", size, "--max-restarts=3", *script]
        options = [size, f"--run-dir={self._folder / f'run_{node}'}", "--on-loss=shrink"]
        options += ["--on-stall=replace", f"--stall-timeout={STALL_S}"]
        if self._machines:
            options += [f"--rdzv-endpoint={self._machines[0].address}:29400", f"--node-rank={node}"]
            options += [
                f"--nnodes={self._plan.num_nodes}",
                f"--rdzv-conf=lost_after={LOST_AFTER_S}",
            ]
        return ["run", *options, *script]

    def close(self) -> None:
        """Kill all remaining processes."""
        for node in self._nodes:
            if _code(node) is None:
                node.kill()  # its guard ends its ranks
            node.wait() if isinstance(node, subprocess.Popen) else node.join()

    def record(self) -> Record:
        """Return the record; `failed` lists everything that is wrong except differing bits."""
        struck = struck_by(self._plan, self._folder)
        hashes = {int(path.stem): path.read_text() for path in self._folder.glob("*.hash")}
        codes = [_code(node) for node in self._nodes]
        failed = "; ".join(self._complaints(hashes, codes, [one.fault for one in struck]))
        record = {
            "training": self._plan.name,
            "layout": self._plan.layout,
            "is_sharded": self._plan.is_sharded,
            "losses": [self._loss(one) for one in struck],
            "bits": sorted(set(hashes.values())),
            "exit_codes": codes,
            "lines": self._said(),
        }
        if failed:
            record |= {"failed": failed, "output": self._output()}
        return record

    def _complaints(
        self, hashes: dict[int, str], codes: list[int | None], faults: list[Fault]
    ) -> Iterator[str]:
        size = self._plan.num_nodes * self._plan.ranks_per_node
        per_node = self._plan.ranks_per_node
        lost = {rank for fault in faults for rank in fault.ranks}
        lost |= {
            node * per_node + place
            for fault in faults
            for node in fault.nodes
            for place in range(per_node)
        }
        if self._plan.layout == TORCHRUN:
            lost = set()
        if hashes.keys() != set(range(size)) - lost:
            yield f"ranks {sorted(hashes)} of {size} finished, and {sorted(lost)} were lost"
        expected: list[int | None] = [0] * len(codes)
        for fault in faults:
            for node in fault.nodes:
                expected[node] = 1 if fault.how == "cut" else -signal.SIGKILL
        if codes != expected:
            yield f"exit codes {codes}, not {expected}"
        if self._left:
            yield f"{len(self._left)} processes survived their launchers"

    def _loss(self, loss: Loss) -> Record:
        """Return the record of a loss; under torchrun, all ranks take part in the next step."""
        restarts = self._plan.layout == TORCHRUN
        return recovery(self._folder, loss, () if restarts else loss.fault.ranks, restarts=restarts)

    def _said(self) -> list[str]:
        """Return the first launcher's output lines about losses."""
        return [
            line for line in lines_of(self._folder / "node_0.log")
            if line.startswith("echelon: ") and ("continu" in line or "hangs" in line)
        ]  # fmt: skip

    def _output(self) -> list[str]:
        paths = sorted(self._folder.glob("node_*.log"))
        return [path.read_text(errors="replace")[-_TAIL:] for path in paths]


def _torchrun(
    arguments: Sequence[str], environ: dict[str, str], path: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    with path.open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
        )


def _code(node: BaseProcess | subprocess.Popen[bytes]) -> int | None:
    """Return a node's exit code, or None while it still runs."""
    return node.poll() if isinstance(node, subprocess.Popen) else node.exitcode


def _left(machine: Host) -> list[int]:
    """Return the pids of a host's processes that outlive their launchers by `_LEFT_S`."""
    due_s = time.monotonic() + _LEFT_S
    while True:
        listed = subprocess.run(
            ["ip", "netns", "pids", machine.name], capture_output=True, text=True, check=True
        )
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids or time.monotonic() > due_s:
            return pids
        time.sleep(_POLL_S)


def reference(folder: Path) -> str:
    """Return the hash of the training on one rank without losses."""
    plan = Plan(
        layout="reference", number=0, num_nodes=1, ranks_per_node=1, is_sharded=False, faults=()
    )
    record = train(plan, folder)
    if "failed" in record:
        raise RuntimeError(
            f"the undisturbed training failed: {record['failed']}, {record['output']}"
        )
    (found,) = record["bits"]
    return str(found)
