"""Convert between steps and the names of their checkpoint folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a step's folder, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the step folders, keyed by step, or {} if the parent folder does not exist."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- one call, which has NFS look again
    except (FileNotFoundError, NotADirectoryError):
        return {}
    steps = {}
    for name in sorted(names, reverse=True):  # of two names for one step, the shorter
        step = step_of(name)
        if step is not None:
            steps[step] = folder / name
    return steps
