"""Manage a job's folder, which contains one checkpoint per step.

FOLDER/step_00000300/000001/...        a checkpoint written by `save`
FOLDER/step_00000300/score             the score that the program passed, if any
FOLDER/.step_00000100-5e0c...trash/    being removed
FOLDER/.keeper                         locked by the job that saves to this folder
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from pathlib import Path

from echelon.dist.checkpoint.disk import files, in_use
from echelon.dist.checkpoint.disk.folder import COMMIT, is_of_a_save, marked, problem_of
from echelon.dist.checkpoint.disk.step_names import step_folders, step_name
from echelon.dist.checkpoint.life.rules import Condition, Found

_TRASH = re.compile(r"\.step_\d+-[0-9a-f]+\.trash")
_SCORE = "score"


class StepFolders:
    """The checkpoints under one folder, keyed by step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which might not exist yet."""
        return step_folders(self.folder).get(step, self.folder / step_name(step))

    def look(self) -> list[Found]:
        """Return the checkpoints found in the folder, in ascending order of step."""
        folders = step_folders(self.folder)
        return [_look(step, folders[step]) for step in sorted(folders)]

    def note_score(self, step: int, score: float | None) -> None:
        """Store a step's score in the step's folder, or remove a stored score if `score` is None.

        Raises:
            OSError: the score cannot be written.
        """
        path = self.path(step)
        (path / _SCORE).unlink(missing_ok=True)
        if score is not None:
            files.make_folder(path)
            files.write_whole(path / _SCORE, json.dumps(score).encode(), sync=True)

    def remove(self, step: int) -> str | None:
        """Remove a step's checkpoint, or return why it was not removed.

        A checkpoint that is being read is not removed, nor is a folder that contains files not
        written by a save. The removal is atomic.
        """
        path = self.path(step)
        if not _is_own(path):
            return "the folder contains files that no save wrote"
        with contextlib.ExitStack() as stack:
            alone = [in_use.alone(version / COMMIT) for version in marked(path)]
            if not all(stack.enter_context(one) for one in alone):
                return "the checkpoint is being read"
            trash = path.with_name(f".{path.name}-{secrets.token_hex(8)}.trash")
            try:
                path.rename(trash)
            except OSError as error:
                return str(error.strerror)
        with contextlib.suppress(OSError):  # the next rotation tries again
            _empty(trash)
        return None

    def sweep(self) -> None:
        """Remove the leftovers of interrupted removals."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self.folder)):  # noqa: PTH208 -- as above
                if _TRASH.fullmatch(name):
                    with contextlib.suppress(OSError):
                        _empty(self.folder / name)


def _look(step: int, path: Path) -> Found:
    score = _score(path)
    reasons = [problem_of(version) for version in reversed(marked(path))]
    if None in reasons:
        return Found(step=step, score=score)
    if reasons:
        return Found(step=step, condition=Condition.DAMAGED, reason=str(reasons[0]), score=score)
    return Found(
        step=step, condition=Condition.UNFINISHED, reason=f"{path}: never completed", score=score
    )


def _score(path: Path) -> float | None:
    try:
        score = json.loads((path / _SCORE).read_bytes())
    except (OSError, ValueError):
        return None
    return float(score) if isinstance(score, (int, float)) else None


def _is_own(path: Path) -> bool:
    if path.is_symlink():
        return False
    names = set(os.listdir(path)) - {_SCORE, f".{_SCORE}.tmp"}  # noqa: PTH208 -- as above
    return all(is_of_a_save(path / name) for name in names)


def _empty(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            files.empty_folder(child)
        else:
            child.unlink(missing_ok=True)
    folder.rmdir()
