"""Compute a training's recovery times from the files that its ranks wrote."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.losses.plan import Fault, Plan


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A fault that occurred, with its time and its first rank's step."""

    fault: Fault
    step: int
    at_s: float


def struck_by(plan: Plan, folder: Path) -> list[Loss]:
    """Return the faults of the plan that occurred."""
    return list(_struck(plan, folder))


def _struck(plan: Plan, folder: Path) -> Iterator[Loss]:
    for number, fault in enumerate(plan.faults):
        path = folder / f"{number}.fired"
        if path.exists():
            step, at_s = path.read_text().split()
            yield Loss(fault=fault, step=int(step), at_s=float(at_s))


def recovery(
    folder: Path, loss: Loss, lost: Sequence[int], *, restarts: bool = False
) -> dict[str, Any]:
    """Return the record of a loss.

    `took_s` lasts until the next commit of a step that was trained without the `lost` ranks, less
    the training's median time between two commits. If all ranks restart, the lost rank's next
    commit counts, because the others may still commit a step that it had finished. `checkpoint` is
    the step of the checkpoint that was loaded in between, if any.
    """
    commits = {
        int(path.stem): [_commit(line) for line in lines_of(path)]
        for path in folder.glob("*.commits")
    }
    counted = [commits.get(rank, []) for rank in (loss.fault.ranks if restarts else commits)]
    after = [at for one in counted for at, gone in one if at > loss.at_s and gone >= set(lost)]
    steps = [b[0] - a[0] for one in commits.values() for a, b in itertools.pairwise(one)]
    found = {**asdict(loss.fault), "at_step": loss.step, "took_s": None, "checkpoint": None}
    if after and steps:
        found["took_s"] = max(0.0, min(after) - loss.at_s - statistics.median(steps))
        found["checkpoint"] = _loaded(folder, loss.at_s, min(after))
    return found


def _loaded(folder: Path, since_s: float, until_s: float) -> int | None:
    loads = [line.split() for path in folder.glob("*.loads") for line in lines_of(path)]
    return next((int(step) for step, at in loads if since_s < float(at) < until_s), None)


def _commit(line: str) -> tuple[float, set[int]]:
    """Parse a commit's line; return its time and the ranks that the step was trained without."""
    _, at_s, *lost = line.split()
    return float(at_s), {int(rank) for rank in ",".join(lost).split(",") if rank}


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, or [] if it does not exist."""
    return path.read_text(errors="replace").splitlines() if path.exists() else []
