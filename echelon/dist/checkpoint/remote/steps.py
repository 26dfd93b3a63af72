"""Manage one checkpoint per step in an object store, with the interface of `disk.steps`.

Object stores have no locks, so a second job that saves to the same address is not detected.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from echelon.dist.checkpoint.disk.step_names import step_name, step_of
from echelon.dist.checkpoint.disk.steps import StepFolders
from echelon.dist.checkpoint.life.rules import Condition, Found
from echelon.dist.checkpoint.remote import version as versions
from echelon.dist.checkpoint.remote.store import Remote

_SCORE = "score"


def steps_of(folder: Path | Remote) -> StepFolders | RemoteSteps:
    """Return the checkpoints in a local or remote folder, keyed by step."""
    return RemoteSteps(folder) if isinstance(folder, Remote) else StepFolders(folder)


class RemoteSteps:
    """The checkpoints under one address, keyed by step."""

    def __init__(self, folder: Remote) -> None:
        self.folder = folder

    def path(self, step: int) -> Remote:
        """Return the path of a step's checkpoint, which might not exist yet."""
        return self.folder / step_name(step)

    def look(self) -> list[Found]:
        """Return the checkpoints found under the address, in ascending order of step."""
        steps = sorted(step for name in self.folder.sizes() if (step := step_of(name)) is not None)
        return [self._look(step) for step in steps]

    def note_score(self, step: int, score: float | None) -> None:
        """Store a step's score in the step's folder, or remove a stored score if `score` is None.

        Raises:
            OSError: the score cannot be written.
        """
        if score is not None:
            self.path(step).write(_SCORE, json.dumps(score).encode())
        else:
            self.path(step).remove([_SCORE])

    def remove(self, step: int) -> str | None:
        """Remove a step's checkpoint, or return why part of it remains.

        The commit marks are removed first.
        """
        path = self.path(step)
        try:
            for version in versions.versions(path):
                versions.remove(version)
            path.remove([_SCORE])
            path.remove_folder()
        except OSError as error:
            return str(error.strerror or error)
        return None

    def sweep(self) -> None:
        """Do nothing, because removing a step also removes its incomplete versions."""

    def _look(self, step: int) -> Found:
        path = self.path(step)
        score = self._score(path)
        reasons = [versions.problem_of(one) for one in reversed(versions.marked(path))]
        if None in reasons:
            return Found(step=step, score=score)
        if reasons:
            reason = str(reasons[0])
            return Found(step=step, condition=Condition.DAMAGED, reason=reason, score=score)
        return Found(
            step=step,
            condition=Condition.UNFINISHED,
            reason=f"{path}: never completed",
            score=score,
        )

    def _score(self, path: Remote) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            score = json.loads(path.read(_SCORE))
            return float(score) if isinstance(score, (int, float)) else None
        return None
