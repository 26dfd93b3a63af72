"""One file that holds everything a run needs to go on as if it had never stopped.

The file appears whole or not at all (written beside, flushed, renamed), and it is read with
`weights_only=True`: a checkpoint from a stranger may be wrong, but it cannot run code.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class CheckpointError(Exception):
    """Say that a file is no checkpoint of this run."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the file at `path` by `state` in one instant; tensors and plain values only."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as stream:
            torch.save({"format": FORMAT, **state}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_checkpoint(path: Path, *, identity: dict[str, int]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, to the CPU.

    Args:
        path: the file.
        identity: what must be as it was for the run to go on exactly (sizes, seed, text).

    Raises:
        CheckpointError: unreadable, foreign, or of a run with another identity.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this example (format {FORMAT})")
    require_identity(path, saved=state["identity"], wanted=identity)
    return state


def require_identity(path: Path, *, saved: dict[str, int], wanted: dict[str, int]) -> None:
    """Check that the checkpoint comes from a run with these settings.

    Raises:
        CheckpointError: it does not; the message lists every difference.
    """
    different = [
        f"{name} {saved.get(name)} there, {value} here"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if different:
        raise CheckpointError(f"{path} belongs to another run: {', '.join(different)}")
