"""Report where a job stopped: rank 0's last step and last checkpoint.

The report shows whether a requeued job can resume from the last step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import DumpFormatError
from echelon.launcher.job.resume import Checkpoint, announced_in
from echelon.launcher.job.rundir import processes_of
from echelon.recorder.format.schema import Live
from echelon.recorder.read import read_ring


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """The point at which rank 0 stopped in an attempt.

    Attributes:
        last_step: the last step that rank 0 began; -1 if it recorded no steps.
        saved: the last checkpoint that rank 0 announced as committed in the attempt; None if it
            announced none.
    """

    last_step: int = -1
    saved: Checkpoint | None = None

    @property
    def saved_at_step(self) -> int | None:
        """The step of the last checkpoint; None if unknown or if no checkpoint was saved."""
        return self.saved.step if self.saved is not None and self.saved.step >= 0 else None

    def line(self) -> str:
        """Return a line for the launcher to print; "" if no step and no checkpoint is known."""
        at, step = self.saved_at_step, self.last_step
        if self.saved is None:
            return f"stopped at step {step}; nothing was saved in this attempt" if step >= 0 else ""
        if at is None:
            return f"saved in {self.saved.path}"
        if at >= step:
            return f"saved at step {at} in {self.saved.path}: a requeued job continues there"
        return f"stopped at step {step}; the newest checkpoint is of step {at}: {self.saved.path}"

    def to_json(self) -> dict[str, Any]:
        """Return this object as an entry of report.json."""
        return {
            "last_step": self.last_step if self.last_step >= 0 else None,
            "saved_at_step": self.saved_at_step,
            "checkpoint": None if self.saved is None else self.saved.path,
        }


def where_it_stopped(run: Path, attempt: int) -> Stopped:
    """Return where rank 0 stopped in an attempt that has ended."""
    step = max(_last_step(folder / "ring") for folder in processes_of(run, 0, attempt))
    return Stopped(last_step=step, saved=announced_in(run, attempt))


def _last_step(ring: Path) -> int:
    """Return the last step that a process began; -1 if it recorded no steps."""
    with contextlib.suppress(DumpFormatError, OSError):
        return int(read_ring(ring).live[Live.STEP]) - 1
    return -1
