"""The recorder's settings, read from the environment here and nowhere else in this room.

| variable | meaning | set by |
|---|---|---|
| ECHELON_RANK_DIR | folder of this rank and attempt, for the ring; unset: no recording | launcher |
| ECHELON_RECORDER_SIZE | operations kept (default 4096); 0: no recording | user, launcher |
| ECHELON_RECORDER_SPANS | ended spans kept (default 1024) | user |
| ECHELON_STACK_SIGNAL | signal number that makes a rank write its stacks; 0: none | user |
| ECHELON_ATTEMPT | number of this start of the job, part of its folders' names | launcher |
| ECHELON_JOB_ID | the job's name in rings and reports | launcher |
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.recorder.schema import DEFAULT_NUM_OPERATIONS, DEFAULT_NUM_SPANS

_MAX_SLOTS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How this process records."""

    directory: Path | None = None
    num_operations: int = DEFAULT_NUM_OPERATIONS
    num_spans: int = DEFAULT_NUM_SPANS
    stack_signal: int = 0
    job_id: str = ""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the settings; a value that is no number counts as not given."""
        directory = os.environ.get("ECHELON_RANK_DIR")
        return cls(
            directory=Path(directory) if directory else None,
            num_operations=_number("ECHELON_RECORDER_SIZE", DEFAULT_NUM_OPERATIONS, 0, _MAX_SLOTS),
            num_spans=_number("ECHELON_RECORDER_SPANS", DEFAULT_NUM_SPANS, 1, _MAX_SLOTS),
            stack_signal=_number("ECHELON_STACK_SIGNAL", _default_signal(), 0, 64),
            job_id=os.environ.get("ECHELON_JOB_ID", ""),
            rank=_number("RANK", 0, 0, 1 << 30),
            local_rank=_number("LOCAL_RANK", 0, 0, 1 << 30),
            world_size=_number("WORLD_SIZE", 1, 1, 1 << 30),
            attempt=_number("ECHELON_ATTEMPT", 0, 0, 1 << 30),
        )

    def allowed(self) -> dict[str, Any]:
        """Return what may be written into the ring: never a secret, never the environment."""
        return {"recorder_size": self.num_operations, "recorder_spans": self.num_spans}


def _default_signal() -> int:
    """Return SIGRTMIN+6: SIGUSR1 and SIGUSR2 belong to the user (Slurm requeue, Lightning)."""
    first = getattr(signal, "SIGRTMIN", None)
    return 0 if first is None else int(first) + 6


def _number(name: str, default: int, low: int, high: int) -> int:
    try:
        value = int(os.environ[name])
    except (KeyError, ValueError):
        return default
    return value if low <= value <= high else default
