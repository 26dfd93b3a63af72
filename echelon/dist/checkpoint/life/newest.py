"""Find the checkpoint to resume from, which is the same on all ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from echelon.dist.checkpoint.disk.folder import COMMIT, marked, problem_of
from echelon.dist.checkpoint.life import rules
from echelon.dist.checkpoint.ranks.peers import find, together
from echelon.dist.checkpoint.remote import version as remote
from echelon.dist.checkpoint.remote.steps import steps_of
from echelon.dist.checkpoint.remote.store import Remote, place_of


def newest(folder: str | os.PathLike[str]) -> Path | str | None:
    """Return the newest complete checkpoint in `folder`, or None if none exists. Collective.

        if newest("runs/gpt") is not None:
            state = load("runs/gpt", state)     # an older checkpoint if the newest is damaged

    Rank 0 searches and sends the result to the other ranks. If no group exists yet, each rank
    searches on its own. A checkpoint counts as complete if it was committed and all its files have
    the right sizes. Rank 0 warns about every newer checkpoint that it skips.

    Args:
        folder: the folder passed to `Keeper`, or the path passed to `save`.

    Returns:
        The path or address of the newest step's checkpoint, or `folder` itself if it is a
        checkpoint. The result can be passed to `load`.

    Raises:
        CheckpointError: rank 0 could not read the folder.
        OSError: this rank could not read the folder.

    Example:
        >>> newest("runs/gpt") is None
        True
        >>> save("runs/gpt", {"step": 7})
        >>> newest("runs/gpt").name
        'gpt'
    """
    place = place_of(folder)
    peers = find(to_write=False)
    looks = peers.rank == 0 or peers.size == 1
    nothing: list[Any] = [None, []]
    found = together(peers, f"{place}: not read", lambda: _newest(place) if looks else nothing)
    path, passed_over = peers.all_gather(found)[0]
    if looks:
        for reason in passed_over:
            warnings.warn(f"{reason}; not loaded", RuntimeWarning, stacklevel=2)
    return path if path is None or isinstance(place, Remote) else Path(path)


def _newest(folder: Path | Remote) -> list[Any]:
    """Return the newest complete checkpoint (or None) and why newer checkpoints are skipped."""
    steps = steps_of(folder)
    found = steps.look()
    chosen = rules.newest(found)
    reasons = [
        one.reason
        for one in reversed(found)
        if one.condition is not rules.Condition.COMPLETE
        and (chosen is None or one.step > chosen.step)
    ]
    if chosen is not None:
        return [_named(steps.path(chosen.step)), reasons]
    problems = _problems(folder)
    whole = problems.index(None) if None in problems else len(problems)
    reasons += [problem for problem in problems[:whole] if problem is not None]
    return [_named(folder) if whole < len(problems) else None, reasons]


def _problems(folder: Path | Remote) -> list[str | None]:
    """Return the damage to each version that `save` wrote (None if intact), newest first."""
    if isinstance(folder, Remote):
        found = [folder] if COMMIT in folder.sizes() else remote.marked(folder)
        return [remote.problem_of(version) for version in reversed(found)]
    versions = [folder] if (folder / COMMIT).exists() else list(marked(folder))
    return [problem_of(version) for version in reversed(versions)]


def _named(place: Path | Remote) -> str:
    return place.address if isinstance(place, Remote) else str(place)
