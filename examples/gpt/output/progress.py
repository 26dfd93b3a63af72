"""Show the progress of training: a live line on a terminal, a few plain lines elsewhere.

A live line ends with a carriage return, so that the next one overwrites it. It is used if standard
output is a terminal, and under `echelon run` on a terminal. There, the launcher reads this
process's pipe, keeps such a line at the bottom of its screen, and passes the width in
ECHELON_TERMINAL_COLUMNS. Rich's live display cannot be used there, because it needs a terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from typing import TextIO

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from gpt.output.peak import Peak

REDRAW_S = 0.2  # five updates per second look live
SMOOTHING = 0.1  # weight of the newest step in the speed that is shown
NUM_PLAIN_LINES = 20  # a line every 5 % of the steps
NUM_KEPT_LINES = 5  # how many lines stay on the screen beside a live line
ERASE_LINE = "\x1b[2K"
RANK_COLUMNS = 4  # the launcher writes "0| " before each line
BAR_COLUMNS = 24
MIN_BAR_COLUMNS = 6


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The work in one step and the number of steps, from which rates are computed."""

    num_steps: int
    tokens_per_step: int
    flops_per_token: int
    peak: Peak | None = None  # base of utilization; None: not shown

    def tokens_per_s(self, step_s: float) -> float:
        """Return the tokens per second if a step takes `step_s`."""
        return self.tokens_per_step / max(step_s, 1e-9)

    def flops_per_s(self, step_s: float) -> float:
        """Return the FLOP rate if a step takes `step_s`; see `GPT.flops_per_token`."""
        return self.tokens_per_s(step_s) * self.flops_per_token


def live_columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that shows `stream`, or None without a terminal."""
    if stream.isatty():
        return shutil.get_terminal_size().columns
    told = os.environ.get("ECHELON_TERMINAL_COLUMNS", "")
    return int(told) - RANK_COLUMNS if told.isdecimal() and int(told) > RANK_COLUMNS else None


def with_unit(value: float, unit: str) -> str:
    """Format a number with three digits and a unit prefix, such as 23.4 k or 1.02 G."""
    prefixes = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    prefix = next((prefix for prefix, size in prefixes.items() if value >= size), "")
    scaled = value / prefixes.get(prefix, 1.0)
    num_decimals = 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{num_decimals}f} {prefix}{unit}"


def as_milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, such as 82.4 ms."""
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"


def as_minutes(seconds: float) -> str:
    """Format a duration in minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """A display of a run's step, loss, speed and remaining time, on one rank.

    Args:
        scale: the work in a step, and the number of steps.
        first_step: the number of steps finished before this run.
        columns: the width of the live line; None for plain lines only.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        scale: Scale,
        *,
        first_step: int = 0,
        stream: TextIO = sys.stdout,
        columns: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scale = scale
        self.stream = stream
        self.columns = columns
        self.now = now
        self.step = first_step
        self.num_steps_seen = 0
        self.training_s = 0.0  # without pauses
        self.step_s = 0.0  # a step's length, smoothed
        self.changed_at = now()
        self.drawn_at = -REDRAW_S
        self.erase = ERASE_LINE if stream.isatty() else ""  # otherwise the launcher does it

    def update(self, step: int, loss: float) -> None:
        """Record a finished step, and show it if a line is due."""
        self._measure(step)
        if self._line_is_due(step):
            self.print(self.plain_line(loss))
        elif self.columns and self.now() - self.drawn_at >= REDRAW_S:
            self.drawn_at = self.now()
            self._write(f"{self.erase}{self.live_line(loss, self.columns)}\r")
        if self.columns and step == self.scale.num_steps:
            self._write(f"{ERASE_LINE}\r")  # no longer live

    def print(self, text: str) -> None:
        """Print lines that the live line does not overwrite."""
        self._write(f"{self.erase}{text}\n")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

    def forget_pause(self) -> None:
        """Exclude the time since the last step from the speed, as it was not spent training."""
        self.changed_at = self.now()

    def _measure(self, step: int) -> None:
        now = self.now()
        seconds = now - self.changed_at
        self.num_steps_seen += 1
        self.training_s += seconds
        newest = max(SMOOTHING, 1 / self.num_steps_seen)  # a plain mean at first
        self.step_s += newest * (seconds - self.step_s)
        self.step = step
        self.changed_at = now

    def _line_is_due(self, step: int) -> bool:
        """Return whether a step gets a permanent line; these are evenly spaced, up to the last."""
        num_lines = NUM_KEPT_LINES if self.columns else NUM_PLAIN_LINES
        return step * num_lines // self.scale.num_steps > (step - 1) * num_lines // (
            self.scale.num_steps
        )

    def _figures(self, loss: float) -> tuple[str, ...]:
        """Return the figures of this step, most important first."""
        scale, step_s = self.scale, self.step_s
        num_steps = scale.num_steps
        speed = with_unit(scale.flops_per_s(step_s), "FLOP/s")
        if scale.peak:
            speed = f"MFU {scale.flops_per_s(step_s) / scale.peak.flops_per_s:.1%}"
        return (
            f"step {self.step:{len(str(num_steps))}}/{num_steps}",
            f"loss {loss:.5f}",
            with_unit(scale.tokens_per_s(step_s), "tokens/s"),
            speed,
            f"ETA {as_minutes((num_steps - self.step) * step_s)}",
        )

    def summary(self) -> str:
        """Return the run's mean speed as text, and how FLOPs are counted."""
        scale = self.scale
        step_s = self.training_s / max(self.num_steps_seen, 1)
        flops_per_s = scale.flops_per_s(step_s)
        speed = (
            f"{self.num_steps_seen} steps in {self.training_s:.1f} s: "
            f"{as_milliseconds(step_s)} per iteration, "
            f"{with_unit(scale.tokens_per_s(step_s), 'tokens/s')}, "
            f"{with_unit(flops_per_s, 'FLOP/s')} "
            f"({with_unit(scale.flops_per_token, 'FLOP')} per token = 6 N + 12 L C T)"
        )
        if scale.peak is None:
            return speed
        share = flops_per_s / scale.peak.flops_per_s
        peak = with_unit(scale.peak.flops_per_s, "FLOP/s")
        return f"{speed}\nMFU {share:.1%} of {peak}, all ranks' peak together ({scale.peak.origin})"

    def plain_line(self, loss: float) -> str:
        """Return the line for a log, which also contains the time per step."""
        step, loss_text, *rates = self._figures(loss)
        return "  ".join((step, loss_text, as_milliseconds(self.step_s), *rates))

    def live_line(self, loss: float, columns: int) -> str:
        """Return the line for a terminal: at most `columns - 1` wide, with a bar if it fits.

        The last column stays free, because a terminal that wraps there would use two rows.
        """
        step, *figures = self._figures(loss)
        text = "  ".join(figures)
        bar_columns = min(BAR_COLUMNS, columns - 1 - len(step) - len(text) - 4)
        row = Table.grid(padding=(0, 2))
        row.add_column(no_wrap=True)
        if bar_columns >= MIN_BAR_COLUMNS:
            row.add_column()
            row.add_column(no_wrap=True)
            row.add_row(step, ProgressBar(self.scale.num_steps, self.step, bar_columns), text)
        else:
            row.add_row(f"{step}  {text}")
        return render(row, columns - 1)


def render(row: Table, columns: int) -> str:
    """Return `row` as rich prints it on a terminal of this width, without the newline."""
    console = Console(file=StringIO(), width=columns, force_terminal=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(row)
    return capture.get().rstrip("\n")
