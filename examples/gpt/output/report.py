"""What a run says and writes while it trains; rank 0 has a voice, the others have a silent one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

from gpt.output.progress import Progress, Scale, live_columns


class Report:
    """Tell the user, and the log file if there is one, how training goes.

    Args:
        scale: the work in a step, and the number of steps.
        first_step: steps that were finished before (a resumed run); the log then goes on too.
        log: a file for one JSON line a step, with the loss at full precision.

    Raises:
        OSError: the log file cannot be opened.
    """

    def __init__(self, scale: Scale, *, first_step: int = 0, log: Path | None = None) -> None:
        self.progress = Progress(scale, first_step=first_step, columns=live_columns(sys.stdout))
        self.log: TextIO | None = None
        if log:
            mode = "a" if first_step else "w"
            self.log = log.open(mode, encoding="utf-8", buffering=1)  # by line: a kill loses none

    def step(self, step: int, loss: float) -> None:
        """Take note of a finished step."""
        self.progress.update(step, loss)
        if self.log:
            self.log.write(json.dumps({"step": step, "loss": loss}) + "\n")

    def say(self, text: str) -> None:
        """Print lines that stay."""
        self.progress.print(text)

    def pause_ended(self) -> None:
        """Leave what was done since the last step out of the speed."""
        self.progress.forget_pause()

    def close(self) -> None:
        """Close the log file."""
        if self.log:
            self.log.close()


class SilentReport(Report):
    """The report of a rank that says nothing."""

    def __init__(self) -> None:
        self.log = None

    def step(self, step: int, loss: float) -> None:
        """Say nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def pause_ended(self) -> None:
        """Measure nothing."""
