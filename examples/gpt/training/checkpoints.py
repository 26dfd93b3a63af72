"""Which checkpoint a run goes on from, and when it is time for the next one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.dist.checkpoint import peek
from echelon.dist.checkpoint.disk.damage import DamagedError
from echelon.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from echelon.dist.group import ProcessGroup
    from gpt.settings import Checkpoint

STEP = "{step}"
AUTO = "auto"


def path_at(path: str, step: int) -> Path:
    """Return where the checkpoint of a step is saved."""
    return Path(path.replace(STEP, str(step)))


def newest(path: str) -> Path | None:
    """Return the newest complete checkpoint that a run with this path has saved; None: it has none.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    damage = None
    for folder in saved_under(path):
        try:
            peek(folder)
        except DamagedError as error:
            damage = damage or error
        except CheckpointError:
            continue  # nothing complete in it
        else:
            return folder
    if damage is not None:
        raise damage
    return None


def saved_under(path: str) -> list[Path]:
    """Return the folders that checkpoints with this path may be in, the latest step first."""
    name = Path(path).name
    if STEP not in name:
        return [Path(path)]
    before, _, after = name.partition(STEP)
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    parent = Path(path).parent
    names = [child.name for child in parent.iterdir()] if parent.is_dir() else []
    steps = {int(found[1]): name for name in names if (found := pattern.fullmatch(name))}
    return [parent / steps[step] for step in sorted(steps, reverse=True)]


def choose_together(path: str, world: ProcessGroup) -> Path | None:
    """Return rank 0's choice of the newest checkpoint, on all ranks. Collective.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
    """
    found, problem = None, None
    if world.rank == 0:
        try:
            found = newest(path)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    chosen, problem = world.broadcast_object([str(found) if found else None, problem], root=0)
    if problem:
        raise CheckpointError(problem, path=path)
    return Path(chosen) if chosen else None


class Timetable:
    """When a checkpoint is due: every so many steps, or every so many seconds.

    The first rank whose seconds are over has all ranks save: they learn of it with a step's loss.
    """

    def __init__(self, settings: Checkpoint, now: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._now = now
        self._saved_at_s = now()

    def is_time(self) -> bool:
        """Say whether the seconds are over."""
        every_s = self._settings.every_s
        return every_s is not None and self._now() - self._saved_at_s >= every_s

    def is_due(self, step: int) -> bool:
        """Say whether the checkpoint of this step is due by its number."""
        every = self._settings.every
        return every is not None and step % every == 0

    def saved(self) -> None:
        """Begin the seconds again."""
        self._saved_at_s = self._now()
