"""Decide which checkpoint in a folder is the newest, and which checkpoints can be removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

Best: TypeAlias = Literal["lowest", "highest"]


class Condition(Enum):
    """The apparent state of a step's checkpoint, determined without reading tensor data."""

    COMPLETE = "complete"
    DAMAGED = "damaged"  # it was committed, and files are missing or have another size
    UNFINISHED = "unfinished"  # it was never committed


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint of one step, as found in the folder.

    Attributes:
        step: the step's number.
        condition: whether the checkpoint appears to be loadable.
        reason: why the checkpoint is not complete, or "" if it is.
        score: the score given by the program, or None.
    """

    step: int
    condition: Condition = Condition.COMPLETE
    reason: str = ""
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules that decide which checkpoints to keep.

    Attributes:
        keep: the number of most recent complete checkpoints to keep.
        keep_every: an interval in steps. Checkpoints at multiples of this interval are also kept.
            None disables this rule.
        best: whether the "lowest" or the "highest" score is the best. The checkpoint with the best
            score is also kept. None disables this rule.
    """

    keep: int = 3
    keep_every: int | None = None
    best: Best | None = None


def newest(found: Sequence[Found]) -> Found | None:
    """Return the complete checkpoint with the highest step, or None if none is complete."""
    return max(_complete(found), key=lambda one: one.step, default=None)


def best(found: Sequence[Found], which: Best) -> Found | None:
    """Return the complete checkpoint with the best score, or None if none has a score.

    If several checkpoints have the best score, the earliest is returned.
    """
    scored = [one for one in _complete(found) if one.score is not None]
    scored = [one for one in scored if not math.isnan(one.score or 0.0)]
    sign = 1.0 if which == "lowest" else -1.0
    return min(scored, key=lambda one: (sign * (one.score or 0.0), one.step), default=None)


def superfluous(found: Sequence[Found], policy: Policy, just_saved: int) -> list[int]:
    """Return, in ascending order, the steps whose checkpoints can be removed after a save.

    Damaged checkpoints do not count toward `keep`. They are retained for inspection until they are
    older than the newest `keep` complete checkpoints.
    """
    complete = sorted(one.step for one in _complete(found))
    if just_saved not in complete:
        return []  # what was saved cannot be seen: no reason to remove anything
    last = complete[-policy.keep :]
    spared = {just_saved, *last, *_spared(found, policy)}
    gone = [step for step in complete if step not in spared]
    for one in found:
        is_old = one.condition is Condition.DAMAGED and one.step < last[0]
        if is_old or one.condition is Condition.UNFINISHED:
            gone.append(one.step)
    return sorted(gone)


def for_room(found: Sequence[Found], policy: Policy) -> list[int]:
    """Return the steps whose checkpoints can be removed to free disk space, in removal order.

    The result never includes the newest complete checkpoint or the best checkpoint. Checkpoints
    kept by `keep_every` are listed last.
    """
    last, top = newest(found), best(found, policy.best) if policy.best else None
    spared = {one.step for one in (last, top) if one is not None}
    steps = sorted(one.step for one in found if one.step not in spared)
    whole = {one.step for one in _complete(found)}
    return sorted(steps, key=lambda step: (step in whole, _is_milestone(step, policy), step))


def _complete(found: Sequence[Found]) -> list[Found]:
    return [one for one in found if one.condition is Condition.COMPLETE]


def _spared(found: Sequence[Found], policy: Policy) -> set[int]:
    spared = {one.step for one in found if _is_milestone(one.step, policy)}
    top = best(found, policy.best) if policy.best else None
    return spared | ({top.step} if top is not None else set())


def _is_milestone(step: int, policy: Policy) -> bool:
    return policy.keep_every is not None and step % policy.keep_every == 0
