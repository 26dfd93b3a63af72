"""Write figures for TensorBoard and Weights & Biases through one interface.

Each library is imported when its writer is created. If the library is missing, an `ImportError`
with a one-line message is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_FOLDERS = {
    "tokens_per_s": "speed",
    "mfu": "speed",
    "iteration_s": "speed",
    "data_wait": "waits",
    "exposed_communication": "waits",
    "peak_memory_bytes": "memory",
}


class Writer(Protocol):
    """A destination for the figures that a `FigureLog` logs.

    Example:
        >>> class Printed:
        ...     def write(self, step, figures):
        ...         print(step, figures["loss"])
        ...
        ...     def close(self): ...
        >>> with FigureLog(None, writers=[Printed()]) as figures:
        ...     figures.step(1, 4.2)
        1 4.2
    """

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, all of which are finite.

        If this method raises an error, the error is reported and the writer is not used again.
        """

    def close(self) -> None:
        """Write all buffered data, and close the output."""


class TensorBoardWriter:
    """A writer that logs figures as TensorBoard scalars, through `torch.utils.tensorboard`.

    Args:
        folder: the folder to which event files are written.
        first_step: the number of steps completed before this run. TensorBoard hides any later
            steps that an earlier run logged.

    Raises:
        ImportError: torch or tensorboard is not installed.

    Example:
        >>> writer = TensorBoardWriter("board")  # needs tensorboard
        >>> with FigureLog(None, writers=[writer]) as figures:
        ...     figures.step(1, 4.2)
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import writer as board
        except ImportError as err:
            raise ImportError(
                "TensorBoardWriter needs torch and tensorboard: run "
                "`pip install 'echelon[figures]'`"
            ) from err
        purged = first_step + 1 if first_step else None
        make: Any = board.SummaryWriter  # has type annotations only if tensorboard is installed
        self._writer = make(str(folder), purge_step=purged)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures as scalars; one of TensorBoard's threads writes them to disk."""
        for name, value in figures.items():
            self._writer.add_scalar(f"{_FOLDERS.get(name, 'training')}/{name}", value, step)

    def close(self) -> None:
        """Write all buffered data, and close the event file."""
        self._writer.close()


class WandbWriter:
    """A writer that logs figures to a run in Weights & Biases.

    Args:
        project: the name of the project in Weights & Biases.
        folder: the folder in which wandb stores its files.
        name: the name of the run; with None, wandb chooses a name.
        run_id: the ID of the run to continue; None means a new run.
        mode: "offline" writes files that `wandb sync` can upload later; "online" uploads the
            figures during the run.
        config: the settings to store with the run.

    Raises:
        ImportError: wandb is not installed.

    Example:
        >>> writer = WandbWriter("gpt", folder="runs/gpt", config={"lr": 1e-3})  # needs wandb
        >>> with FigureLog("runs/gpt/figures.jsonl", writers=[writer]) as figures:
        ...     figures.step(1, 4.2)
    """

    def __init__(
        self,
        project: str,
        *,
        folder: str | Path = ".",
        name: str | None = None,
        run_id: str | None = None,
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as err:
            raise ImportError(
                "WandbWriter needs wandb: run `pip install 'echelon[wandb]'`"
            ) from err
        Path(folder).mkdir(parents=True, exist_ok=True)
        init: Any = wandb.init  # has type annotations only if wandb is installed
        self._run = init(
            project=project,
            dir=str(folder),
            name=name,
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            config=dict(config or {}),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures; a wandb process writes them to disk."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the wandb run, and wait until wandb has written all data."""
        self._run.finish()
