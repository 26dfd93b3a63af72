"""Define two records: the state of a worker, and the reason for collecting an incident."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.launcher.incident.torch_dumps import TorchDump


@dataclass(kw_only=True, slots=True)
class Worker:
    """A worker and its state, as recorded by the agent."""

    rank: int
    local_rank: int
    folder: Path
    logs: Path = Path()  # of its stdout.log and stderr.log
    pid: int = 0
    exit_code: int | None = None
    exited_mono_ns: int = 0
    exit_order: int = -1
    stopped_by_agent: bool = False
    start_error: str = ""
    torch: TorchDump | None = None
    may_signal: bool = True  # False: another launcher's process, which must not be disturbed

    @property
    def alive(self) -> bool:
        """True if the worker was started and has not ended."""
        return self.pid != 0 and self.exit_code is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Occasion:
    """The reason for collecting an incident."""

    kind: str  # "failure", "stall" or "signal"
    attempt: int
    world_size: int
    job_id: str
    oom_kills_before: int | None  # the cgroup's count when the job began
