"""Read the recorder's settings from the environment.

| variable | meaning | set by |
|---|---|---|
| ECHELON_RANK_DIR | the folder of this rank and attempt | launcher |
| ECHELON_RECORD_DIR | the folder for recording without the launcher | user |
| ECHELON_RECORD | 1: record all torch programs; 0: only programs that import echelon | user |
| ECHELON_RECORD_OWNER | the process that records; its children do not record | recorder |
| ECHELON_RING_DIR | a node-local folder for the rings | user |
| ECHELON_STALL_TIMEOUT | the stall limit in seconds if there is no agent (default 60) | user |
| ECHELON_RECORDER_SIZE | the number of operations stored (default 4096); 0: off | user, launcher |
| ECHELON_RECORDER_SPANS | the number of ended spans stored (default 1024) | user |
| ECHELON_STACK_SIGNAL | the signal that makes a rank write its stacks; 0: none | user |
| ECHELON_FAULTHANDLER | 0: do not handle fatal signals (default 1) | user |
| ECHELON_ATTEMPT | the number of this attempt | launcher |
| ECHELON_JOB_ID | the job's name in rings and reports | launcher |
| ECHELON_MODULES_FILE | the file in which this rank lists its imported modules | launcher |
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.recorder.format.schema import DEFAULT_NUM_OPERATIONS, DEFAULT_NUM_SPANS, MAX_SLOTS

DEFAULT_STALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The recorder's settings for this process."""

    rank_dir: Path | None = None  # set by the launcher: an agent watches
    record_dir: Path | None = None
    ring_dir: Path | None = None
    modules_file: Path | None = None  # the launcher keeps standbys
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    num_operations: int = DEFAULT_NUM_OPERATIONS
    num_spans: int = DEFAULT_NUM_SPANS
    stack_signal: int = 0
    chose_signal: bool = False  # the user did
    handles_faults: bool = True
    was_spawned: bool = False  # by multiprocessing, and is nevertheless a rank
    job_id: str = ""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 0  # 0: not given
    attempt: int = 0

    @property
    def has_agent(self) -> bool:
        """True if a launcher's agent watches this process."""
        return self.rank_dir is not None

    @property
    def has_rank_0s_clock(self) -> bool:
        """True if rank 0 is known to run on this host and therefore to share its clock."""
        return self.rank == 0 or self.local_world_size == self.world_size

    @property
    def records(self) -> bool:
        """True if recording is enabled."""
        return self.num_operations > 0 and bool(self.rank_dir or self.record_dir)

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings from the environment. Invalid numbers are ignored."""
        return cls(
            rank_dir=_folder("ECHELON_RANK_DIR"),
            record_dir=_folder("ECHELON_RECORD_DIR") or _default_folder(),
            ring_dir=_folder("ECHELON_RING_DIR"),
            modules_file=_folder("ECHELON_MODULES_FILE"),
            stall_timeout_s=_seconds("ECHELON_STALL_TIMEOUT", DEFAULT_STALL_TIMEOUT_S),
            num_operations=_number("ECHELON_RECORDER_SIZE", DEFAULT_NUM_OPERATIONS, 0, MAX_SLOTS),
            num_spans=_number("ECHELON_RECORDER_SPANS", DEFAULT_NUM_SPANS, 1, MAX_SLOTS),
            stack_signal=_number("ECHELON_STACK_SIGNAL", _default_signal(), 0, 64),
            chose_signal="ECHELON_STACK_SIGNAL" in os.environ,
            handles_faults=bool(_number("ECHELON_FAULTHANDLER", 1, 0, 1)),
            job_id=os.environ.get("ECHELON_JOB_ID", ""),
            rank=_number("RANK", 0, 0, 1 << 30),
            local_rank=_number("LOCAL_RANK", 0, 0, 1 << 30),
            world_size=_number("WORLD_SIZE", 1, 1, 1 << 30),
            local_world_size=_number("LOCAL_WORLD_SIZE", 0, 1, 1 << 30),
            attempt=_number("ECHELON_ATTEMPT", 0, 0, 1 << 30),
        )

    def allowed(self) -> dict[str, Any]:
        """Return the settings that are written to the ring."""
        return {"recorder_size": self.num_operations, "recorder_spans": self.num_spans}


def claim_ownership(process: str) -> bool:
    """Claim ECHELON_RECORD_DIR for `process`; return whether `process` is allowed to record.

    Only the first process that calls this function is allowed to record. The processes that it
    starts inherit ECHELON_RECORD_OWNER and must not record.
    """
    return os.environ.setdefault("ECHELON_RECORD_OWNER", process) == process


def _folder(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text) if text else None


def _default_folder() -> Path | None:
    return Path("echelon_record") if os.environ.get("ECHELON_RECORD") == "1" else None


def _seconds(name: str, default: float) -> float:
    try:
        value = float(os.environ[name])
    except (KeyError, ValueError):
        return default
    return value if 0 < value < 1e9 else default


def _default_signal() -> int:
    """Return the default stack signal, SIGRTMIN+6, or 0 if it is unavailable.

    SIGUSR1 and SIGUSR2 are avoided because programs often use them.
    """
    first = getattr(signal, "SIGRTMIN", None)
    return 0 if first is None else int(first) + 6


def _number(name: str, default: int, low: int, high: int) -> int:
    try:
        value = int(os.environ[name])
    except (KeyError, ValueError):
        return default
    return value if low <= value <= high else default
