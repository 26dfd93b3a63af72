"""Report a run during training: rank 0 prints and writes, and all ranks take part."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.train.figures import FigureLog
from gpt.output.progress import Progress, Scale, live_columns

if TYPE_CHECKING:
    import torch

    from echelon.dist.group import ProcessGroup
    from echelon.train.figures.writers import Writer
    from gpt.training.loop import Trainer


class Report:
    """Progress for the user and, on request, figures for a log and other writers.

    Args:
        scale: the work in a step, and the number of steps.
        first_step: the number of steps finished before this run; the log continues there.
        log: a file that gets one JSON line per step.
        writers: other receivers of the figures, on rank 0; an empty list on other ranks. None on
            all ranks if there are no other receivers.
        world: the ranks, all of which make the same calls; rank 0 reports.
        device: the device on which the ranks compute.

    Raises:
        ValueError: the file exists and is not a log.
    """

    def __init__(
        self,
        scale: Scale,
        *,
        first_step: int = 0,
        log: str | Path | None = None,
        writers: Sequence[Writer] | None = None,
        world: ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        speaks = world is None or world.rank == 0
        columns = live_columns(sys.stdout)
        self.progress = Progress(scale, first_step=first_step, columns=columns)
        self.speaks = speaks
        self.figures: FigureLog | None = None
        on_host = device is None or device.type == "cpu"  # figures are compared in host memory
        is_wanted = log is not None or writers is not None
        if is_wanted and (speaks or on_host):
            self.figures = FigureLog(
                log,
                tokens_per_step=scale.tokens_per_step,
                flops_per_token=scale.flops_per_token,
                peak_flops=scale.peak.flops_per_s if scale.peak else 0.0,
                first_step=first_step,
                group=world if on_host else None,
                writers=writers or (),
            )

    def step(self, trainer: Trainer, loss: float) -> None:
        """Record a finished step. Collective if there are figures."""
        if self.speaks:
            self.progress.update(trainer.step, loss)
        if self.figures:
            num_samples = trainer.settings.batch
            self.figures.step(
                trainer.step,
                loss,
                gradient_norm=trainer.gradient_norm,
                learning_rate=trainer.learning_rate,
                first_sample=trainer.samples - num_samples,
                num_samples=num_samples,
            )

    def note(self, step: int, **figures: Any) -> None:
        """Log additional figures of a step."""
        if self.figures:
            self.figures.note(step, **figures)

    def say(self, text: str) -> None:
        """Print lines on rank 0 that the live line does not overwrite."""
        if self.speaks:
            self.progress.print(text)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block from the speed, because it is not training."""
        try:
            with self.figures.pause() if self.figures else nullcontext():
                yield
        finally:
            self.progress.forget_pause()

    def close(self) -> None:
        """Close the log and the other writers."""
        if self.figures:
            self.figures.close()
