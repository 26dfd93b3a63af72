"""Find the job's newest committed checkpoint in rank 0's reports or in `--checkpoint-dir`.

    RUN/rank_0/attempt_<n>/checkpoint.json      written by rank 0 when a checkpoint is committed
    RUN/rank_0/lost_<k>_of_attempt_<n>/...      the same, for a process that was lost and replaced
    DIR/step_<n>/<version>/commit               Keeper's layout
    DIR/<version>/commit                        a single checkpoint with its versions

A version of a checkpoint is valid once its commit mark exists (docs/checkpoints.md). The search
runs on a separate thread, because the file system might hang.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echelon.launcher.job.rundir import processes_of

SEARCH_S = 60.0  # a slow file system delays an attempt no longer than this
POLL_S = 0.02
_BRIEFLY_S = 0.05
_VERSION = re.compile(r"\d{6,}")
_STEP = re.compile(r"step_(\d{1,18})")
_ATTEMPT = re.compile(r"(?:lost_\d+_of_)?attempt_(\d+)")
_ANNOUNCED = "checkpoint.json"
_COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint; `step` is -1 if the step is unknown."""

    path: str
    step: int = -1


def newest(run: Path, folder: Path | None) -> Checkpoint | None:
    """Return the job's newest committed checkpoint, or None if no checkpoint is found.

    Args:
        folder: the value of `--checkpoint-dir`; None selects the newest checkpoint that rank 0
            announced and that still has a committed version.

    Raises:
        OSError: a folder that exists cannot be read.
    """
    if folder is not None:
        return _in_folder(folder.absolute())
    for told in _announced(run):
        if _has_version(Path(told.path)):
            return told
    return None


def announced_in(run: Path, attempt: int) -> Checkpoint | None:
    """Return the last checkpoint that rank 0 announced in an attempt; None if it announced none."""
    told = (_read(folder / _ANNOUNCED) for folder in processes_of(run, 0, attempt))
    return next((one for one in told if one is not None), None)


def _announced(run: Path) -> list[Checkpoint]:
    """Return the checkpoints that rank 0 announced, newest first."""
    numbers = {
        int(match[1])
        for path in (run / "rank_0").glob(f"*attempt_*/{_ANNOUNCED}")
        if (match := _ATTEMPT.fullmatch(path.parent.name))
    }
    told = (
        _read(folder / _ANNOUNCED)
        for number in sorted(numbers, reverse=True)
        for folder in processes_of(run, 0, number)
    )
    return [one for one in told if one is not None]


def _read(path: Path) -> Checkpoint | None:
    try:
        told = json.loads(path.read_text())
        step = told["step"]
        return Checkpoint(str(told["path"]), step if isinstance(step, int) else -1)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_folder(folder: Path) -> Checkpoint | None:
    if not folder.is_dir():
        return None
    if _has_version(folder):
        return Checkpoint(str(folder))
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    }
    for step in sorted(steps, reverse=True):
        if _has_version(steps[step]):
            return Checkpoint(str(steps[step]), step)
    return None


def _has_version(folder: Path) -> bool:
    """Return whether a checkpoint's folder contains a committed version."""
    if not folder.is_dir():
        return False
    return any(
        _VERSION.fullmatch(path.name) and (path / _COMMIT).is_file() for path in folder.iterdir()
    )


class Search:
    """A search for the newest checkpoint. The search is repeated before each attempt.

    Attributes:
        found: the result of the last completed search.
    """

    def __init__(self, run: Path, folder: Path | None, say: Callable[[str], None]) -> None:
        self._run = run
        self._folder = folder
        self._say = say
        self._thread: threading.Thread | None = None
        self._until_s = 0.0
        self._error = ""
        self.found: Checkpoint | None = None

    def begin(self, now_s: float) -> None:
        """Begin a new search on a separate thread."""
        self._until_s = now_s + SEARCH_S
        self._error = ""
        self._thread = None
        if self._folder is None and not _announced(self._run):
            return  # there is nothing to search
        self._thread = threading.Thread(target=self._look, name="echelon-checkpoints", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: keep the last answer
            self._thread.start()
            self._thread.join(_BRIEFLY_S)  # usually there is little to search

    def is_over(self, now_s: float) -> bool:
        """Return whether the search has finished or timed out, so that an attempt can begin."""
        if self._thread is None:
            return True
        if self._thread.is_alive() and now_s < self._until_s:
            return False
        if self._thread.is_alive():
            self._error = f"no answer within {SEARCH_S:g} s"
        self._thread = None
        if self._error:
            held = f"{self.found.path} as before" if self.found is not None else "none"
            self._say(f"cannot look for checkpoints ({self._error}); ECHELON_RESUME is {held}")
        return True

    def _look(self) -> None:
        try:
            found = newest(self._run, self._folder)
        except OSError as err:
            self._error = str(err)
        else:
            self.found = found
