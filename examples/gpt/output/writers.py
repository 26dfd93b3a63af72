"""Write the figures to TensorBoard and Weights & Biases, if requested."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from echelon.train.figures import TensorBoardWriter, WandbWriter
from echelon.train.figures.writers import Writer
from gpt.settings import Report

EXTRAS = {"tensorboard": "figures", "wandb": "wandb"}


def require_installed(settings: Report) -> None:
    """Check that the requested writers are installed, before training starts.

    Raises:
        ValueError: a requested writer is not installed.
    """
    for library, extra in EXTRAS.items():
        if getattr(settings, library) and find_spec(library) is None:
            raise ValueError(f"--{library} needs {library}: pip install 'echelon[{extra}]'")


def open_writers(settings: Report, *, first_step: int, config: Mapping[str, Any]) -> list[Writer]:
    """Open the requested writers.

    Args:
        first_step: the number of steps finished before this run.
        config: the settings of the run, which Weights & Biases stores.
    """
    found: list[Writer] = []
    if settings.tensorboard:
        found.append(TensorBoardWriter(settings.tensorboard, first_step=first_step))
    if settings.wandb:
        mode = os.environ.get("WANDB_MODE", "offline")
        found.append(WandbWriter(settings.wandb, mode=mode, config=config))
    return found
