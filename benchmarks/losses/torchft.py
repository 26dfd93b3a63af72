"""Run one training of three replicas under torchft, and return its record. Needs torchft.

As in the other trainings, replicas are forked from a process that has loaded torch and torchft.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.losses.model import NUM_MICRO_BATCHES
from benchmarks.losses.plan import TOTAL, Plan
from benchmarks.losses.preloaded import _context
from benchmarks.losses.recovery import lines_of, recovery, struck_by

_LIMIT_S = 600.0
_TAIL = 4000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of torchft.

    Attributes:
        group: the replicas' process group: torchft's "gloo", or "echelon".
        timeout_s: the timeout of the manager's and the group's operations.
        heartbeat_timeout_ms: the time without heartbeats until the lighthouse considers a replica
            dead.
        join_timeout_ms: how long the lighthouse waits for replicas that still send heartbeats.
        quorum_tick_ms: the interval at which the lighthouse checks for a quorum.
    """

    group: str
    timeout_s: float
    heartbeat_timeout_ms: int
    join_timeout_ms: int
    quorum_tick_ms: int = 100


_SHORT = {"timeout_s": 5, "heartbeat_timeout_ms": 1000, "join_timeout_ms": 1000}
SETTINGS = {
    "torchft, its defaults": Settings(
        group="gloo", timeout_s=60, heartbeat_timeout_ms=5000, join_timeout_ms=60_000
    ),
    "torchft, short timeouts": Settings(group="gloo", quorum_tick_ms=50, **_SHORT),
    "torchft, short timeouts, ProcessGroupEchelon": Settings(
        group="echelon", quorum_tick_ms=50, **_SHORT
    ),
}


def train(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run one training with the settings named by the plan's layout; return its record.

    `samples_left_out` counts the micro-batches that are in no committed step.
    """
    folder.mkdir(parents=True)
    codes = _run(plan, folder)
    losses = struck_by(plan, folder)
    hashes = {int(path.stem): path.read_text() for path in folder.glob("*.hash")}
    record: dict[str, Any] = {
        "training": plan.name,
        "layout": plan.layout,
        "losses": [recovery(folder, one, one.fault.ranks) for one in losses],
        "bits": sorted(set(hashes.values())),
        "exit_codes": codes,
        "samples_left_out": _left_out(folder),
    }
    lost = {rank for one in losses for rank in one.fault.ranks}
    expected = [-signal.SIGKILL if rank in lost else 0 for rank in range(plan.ranks_per_node)]
    if codes != expected:
        logs = sorted(folder.glob("node_*.log"))
        record["failed"] = f"exit codes {codes}, not {expected}"
        record["output"] = [path.read_text(errors="replace")[-_TAIL:] for path in logs]
    return record


def _run(plan: Plan, folder: Path) -> list[int | None]:
    """Run the replicas to their end; return their exit codes."""
    os.environ.setdefault("RUST_LOG", "warn")  # else the lighthouse logs each quorum
    from torchft.coordination import LighthouseServer

    settings = SETTINGS[plan.layout]
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=settings.join_timeout_ms,
        quorum_tick_ms=settings.quorum_tick_ms,
        heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
    )
    replicas: list[BaseProcess] = []
    try:
        all_here = _context.Barrier(plan.ranks_per_node)
        told = {**asdict(plan), **asdict(settings), "total": TOTAL, "cut": []}
        for rank in range(plan.ranks_per_node):
            args = (folder, rank, told, lighthouse.address(), all_here)
            replicas.append(_context.Process(target=_replica, args=args))
            replicas[-1].start()
        due_s = time.monotonic() + _LIMIT_S
        for one in replicas:
            one.join(max(0.0, due_s - time.monotonic()))
        return [one.exitcode for one in replicas]
    finally:
        for one in replicas:
            one.kill()
            one.join()
        lighthouse.shutdown()


def _replica(*args: Any) -> None:
    from benchmarks.losses import replica  # loads torchft, in the process that needs it

    replica.main(*args)


def _left_out(folder: Path) -> int:
    counts = dict(_counts(folder))
    return sum(NUM_MICRO_BATCHES - counts.get(step, 0) for step in range(TOTAL))


def _counts(folder: Path) -> Iterator[tuple[int, int]]:
    for path in folder.glob("*.counts"):
        for line in lines_of(path):
            step, count = line.split()
            yield int(step), int(count)


def distance(folder: Path, undisturbed: Path) -> float:
    """Return the distance of the final weights from those in a file, relative to their norm."""
    import torch

    def vector(path: Path) -> Any:
        return torch.cat([
            one.double().flatten() for one in torch.load(path, weights_only=True).values()
        ])  # fmt: skip

    right = vector(undisturbed)
    found = [vector(path) for path in folder.glob("*.weights")]
    return max((float((one - right).norm() / right.norm()) for one in found), default=float("inf"))
