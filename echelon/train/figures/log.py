"""Log a run's figures for each step; rank 0 writes the log.

[Note: what the shares mean] `data_wait` is the fraction of the iteration's time that the training
thread spent in `recorder.span("data_wait")` spans, which `TokenLoader` and `recorder.watch` open.
`exposed_communication` is the fraction of the iteration's time that the thread spent blocked in
collectives and point-to-point transfers. It includes transfers that computation did not hide, and
waits for late ranks (in a pipeline, the bubble).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.recorder.current import say
from echelon.train.figures.costs import Moment, gather
from echelon.train.figures.file import FigureFile
from echelon.train.figures.writers import Writer

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

    from echelon.dist.group import ProcessGroup

_FULL_PRECISION = ("loss", "gradient_norm", "learning_rate")  # the others: six digits


class FigureLog:
    """A log that writes a run's figures to a file, one JSON line per step, and to other writers.

    A resumed run first removes the lines of steps after `first_step` and then appends. A full disk
    or any other failure of the file or a writer is reported once and never stops the training.
    Use the log only from the training thread.

    Args:
        path: the path of the file, which is created along with its folder if necessary; with None,
            no file is written.
        tokens_per_step: the number of tokens per step over all ranks, from which rates are
            computed; with 0, no rates are logged.
        flops_per_token: the number of floating-point operations per token in the forward and
            backward passes; with 0, no MFU is logged.
        peak_flops: the peak number of floating-point operations per second, summed over all ranks,
            from which MFU is computed; with 0, no MFU is logged.
        first_step: the number of steps that were completed before this run.
        group: the ranks whose waits and memory are compared. All of these ranks must make the same
            calls. In each call, a rank sends 32 bytes from host memory. With None, only the figures
            of this process are logged.
        writers: additional outputs, used only on the rank that writes the log.
        now: the clock, which returns seconds.

    Raises:
        ValueError: a number is negative, or `path` exists and is not a metrics log.

    Example:
        >>> with FigureLog(
        ...     "runs/gpt/figures.jsonl",
        ...     tokens_per_step=tokens.numel(),
        ...     flops_per_token=model.flops_per_token(),
        ...     group=world,  # on all ranks; rank 0 writes
        ... ) as figures:
        ...     for step in range(1, 4):
        ...         loss = loss_fn(model(tokens), targets)
        ...         figures.step(step, loss.item(), learning_rate=1e-3)
        ...         if step % 2 == 0:
        ...             with figures.pause():  # not part of an iteration
        ...                 figures.note(step, validation_loss=loss.item())
        >>> len(read_figures("runs/gpt"))
        4
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        tokens_per_step: int = 0,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        first_step: int = 0,
        group: ProcessGroup | None = None,
        writers: Sequence[Writer] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        numbers = (tokens_per_step, flops_per_token, peak_flops, first_step)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(
                "tokens_per_step, flops_per_token, peak_flops and first_step must be finite and "
                f">= 0, got {numbers}"
            )
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._group = group
        self._writes = group is None or group.rank == 0
        self._now = now
        self._last_step = first_step
        self._file: FigureFile | None = None
        self._has_warned = False
        self._path = path
        if path is not None and self._writes:
            try:
                self._file = FigureFile(Path(path), first_step)
            except OSError as err:
                self._warn(f"{path}: {err.strerror or err}")
        self._writers = list(writers) if self._writes else []
        self._began = Moment.now(now())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(
        self,
        step: int,
        loss: float,
        *,
        gradient_norm: float | None = None,
        learning_rate: float | None = None,
        **more: float,
    ) -> None:
        """Log a completed step, and start timing the next one. Collective if a group was given.

        If the method is called less often than once per step, the measured times and rates are
        averages over the steps since the last call.

        Args:
            step: the number of completed steps. If this step was logged before, because the run
                returned to a checkpoint, the lines from this step on are removed first.
            loss: the loss of the whole batch. A loss that is not finite is logged as null and
                listed in `not_finite`.
            gradient_norm: the norm of the gradients; omitted if None.
            learning_rate: the learning rate; omitted if None.
            more: any other figures.

        Raises:
            CollectiveError: the group failed.
        """
        moment = Moment.now(self._now())
        costs = gather(moment - self._began, self._group)
        if self._writes:
            num_steps = step - self._last_step
            if num_steps < 1:
                self._go_back(step)
                num_steps = 1
            given = {"gradient_norm": gradient_norm, "learning_rate": learning_rate, **more}
            named = {name: value for name, value in given.items() if value is not None}
            self._write(step, {"loss": loss, **named, **self._rates(costs, num_steps)})
        self._last_step = step
        self._began = Moment.now(self._now())

    def note(self, step: int, **figures: float) -> None:
        """Log figures that only some steps have, such as `validation_loss`, on a separate line.

        Not collective. On ranks that do not write the log, the method does nothing.
        """
        if self._writes:
            self._write(step, dict(figures))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude time spent inside the context, for example in evaluation, from all figures."""
        before = Moment.now(self._now())
        try:
            yield
        finally:
            self._began += Moment.now(self._now()) - before

    def forget_pause(self) -> None:
        """Restart the timing of the current step, to exclude the time before this call."""
        self._began = Moment.now(self._now())

    def close(self) -> None:
        """Close the file and the writers. Can be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None
        writers, self._writers = self._writers, []
        for writer in writers:
            self._pass_on(writer.close, writer)

    # ---- figures ----

    def _rates(self, costs: npt.NDArray[Any], num_steps: int) -> dict[str, float]:
        """Return the speed, waiting times and memory use of the steps since the last call."""
        iteration_s = max(float(costs[:, 0].max()) / num_steps, 1e-9)
        figures = {"iteration_s": iteration_s, "peak_memory_bytes": float(costs[:, 3].max())}
        if self._tokens_per_step:
            tokens_per_s = self._tokens_per_step / iteration_s
            figures["tokens_per_s"] = tokens_per_s
            if self._flops_per_token and self._peak_flops:
                figures["mfu"] = tokens_per_s * self._flops_per_token / self._peak_flops
        shares = costs[:, 1:3] / costs[:, :1].clip(min=1e-9)
        figures["data_wait"], figures["exposed_communication"] = shares.mean(axis=0).tolist()
        if len(costs) > 1:
            # The rank that the others wait for is the one that waits the least.
            figures["data_wait_max"] = float(shares[:, 0].max())
            figures["data_wait_max_rank"] = int(shares[:, 0].argmax())
            figures["exposed_communication_min"] = float(shares[:, 1].min())
            figures["exposed_communication_min_rank"] = int(shares[:, 1].argmin())
        return figures

    # ---- writing ----

    def _write(self, step: int, figures: dict[str, float]) -> None:
        numbers = {name: float(value) for name, value in figures.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if self._file is not None:
            line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
            line |= {name: _shortened(name, finite.get(name)) for name in numbers}
            if len(finite) < len(numbers):
                line["not_finite"] = [name for name in numbers if name not in finite]
            try:
                self._file.append(line)
            except OSError as err:
                self._warn(f"{self._path}: {err.strerror or err}")
        for writer in list(self._writers):
            self._pass_on(functools.partial(writer.write, step, finite), writer)

    def _pass_on(self, call: Callable[[], object], writer: Writer) -> None:
        try:
            call()
        except Exception as err:  # noqa: BLE001 -- another library's trouble never ends a training
            with contextlib.suppress(ValueError):
                self._writers.remove(writer)
            kind = type(writer).__name__
            reason = f"{type(err).__name__}: {err}"
            say(f"{kind} failed and receives no more figures: {reason}; training continues")

    def _go_back(self, step: int) -> None:
        if self._file is not None:
            try:
                self._file.drop_after(step - 1)
            except OSError as err:
                self._warn(f"{self._path}: {err.strerror or err}")

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            say(f"cannot write figures: {reason}; training continues")


def _shortened(name: str, value: float | None) -> float | int | None:
    """Round a number for the log: to an int if it is whole, or else to six significant digits."""
    if value is None or name in _FULL_PRECISION:
        return value
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")
