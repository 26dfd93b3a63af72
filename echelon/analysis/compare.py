"""Find the first step, micro-batch, parameter and rank at which two runs diverge.

The input is the output of `SameBits(..., fingerprints=FOLDER)`. The two runs can have different
numbers of ranks.
"""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = "fingerprints"


@dataclass
class MicroBatch:
    """The recorded fingerprints of one micro-batch.

    Attributes:
        rank: the rank that computed the loss.
        loss: the fingerprint of the loss; "" if it was not recorded.
        stages: the gradient fingerprints of each pipeline stage, keyed by stage index. A
            model without a pipeline has one stage, 0.
        ranks: the rank that recorded each stage's fingerprints, keyed by stage index.
    """

    rank: int = -1
    loss: str = ""
    stages: dict[int, dict[str, str]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    @property
    def gradients(self) -> dict[str, str]:
        """The gradient fingerprints of all stages, keyed by parameter name, in model order."""
        return {name: one for _, some in sorted(self.stages.items()) for name, one in some.items()}

    def rank_of(self, name: str) -> int:
        """Return the rank that recorded the fingerprint of a parameter's gradient.

        If no rank recorded it, return the rank that computed the loss.
        """
        for stage, gradients in self.stages.items():
            if name in gradients:
                return self.ranks[stage]
        return self.rank


@dataclass
class Bits:
    """The fingerprints recorded in one run.

    Attributes:
        micro_batches: the records of micro-batches, keyed by step and micro-batch number. For a
            repeated step, only the records of the last repetition are included.
        norms: the norms of the reduced gradients, keyed by step and then by rank.
        num_torn: the number of lines that could not be read.
    """

    micro_batches: dict[tuple[int, int], MicroBatch] = field(default_factory=dict)
    norms: dict[int, dict[int, str]] = field(default_factory=dict)
    num_torn: int = 0


@dataclass(frozen=True)
class Parting:
    """The point at which two runs diverge.

    Attributes:
        step: the first step at which the runs diverge; None if they do not.
        text: a description for the user, in one to three lines.
    """

    step: int | None
    text: str


def compare(first: Path, second: Path) -> Parting:
    """Compare two runs, and return the point at which they diverge.

    Args:
        first, second: folders of fingerprints, or run directories that contain such a folder.

    Raises:
        ValueError: a folder has no fingerprints, or the runs have no micro-batch in common.
        OSError: a file cannot be read.
    """
    one, two = read_bits(first), read_bits(second)
    common = sorted(set(one.micro_batches) & set(two.micro_batches))
    if not common:
        raise ValueError(f"{first} and {second} have no micro-batches in common")
    torn = one.num_torn + two.num_torn
    note = f"\n{torn} lines could not be read and were left out" if torn else ""
    steps = sorted({step for step, _ in common})
    for step in steps:
        numbers = [number for at, number in common if at == step]
        text = _numbers_part(one, two, step) or _step_parts(one, two, step, numbers)
        if text:
            return Parting(step, text + note)
    micro_batches = f"{len(common)} micro-batch{'es' * (len(common) != 1)}"
    text = f"the same bits in {micro_batches} of steps {steps[0]} to {steps[-1]}{note}"
    return Parting(None, text)


def read_bits(folder: Path) -> Bits:
    """Read the fingerprints recorded in one run.

    Raises:
        ValueError: the folder has no fingerprints.
        OSError: a file cannot be read.
    """
    inner = folder / _FOLDER
    paths = sorted((inner if inner.is_dir() else folder).glob("rank_*.jsonl"))
    if not paths:
        raise ValueError(
            f"{folder} has no fingerprints: record them with SameBits(..., fingerprints=FOLDER)"
        )
    found = Bits()
    lines = []
    for path in paths:
        for text in path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
                lines.append((int(line.get("wall_ns", 0)), line))
            except (ValueError, TypeError, AttributeError):
                found.num_torn += 1  # a rank that was killed leaves half a line
    for _, line in sorted(
        lines, key=operator.itemgetter(0)
    ):  # a repetition replaces what it repeats
        try:
            _take(found, line)
        except (ValueError, KeyError, TypeError, AttributeError):
            found.num_torn += 1
    return found


def _take(found: Bits, line: dict[str, Any]) -> None:
    step, rank = int(line["step"]), int(line["rank"])
    if "norm" in line:
        found.norms.setdefault(step, {})[rank] = str(line["norm"])
        return
    gradients = {str(name): str(value) for name, value in line["gradients"].items()}
    key = step, int(line["number"])
    if "stage" not in line and gradients:  # of the whole model: a repetition replaces all
        found.micro_batches[key] = MicroBatch(rank, str(line["loss"]), {0: gradients}, {0: rank})
        return
    one = found.micro_batches.setdefault(key, MicroBatch())
    if "stage" in line:
        stage = int(line["stage"])
        one.stages[stage], one.ranks[stage] = gradients, rank
    else:
        one.rank, one.loss = rank, str(line["loss"])


def _numbers_part(one: Bits, two: Bits, step: int) -> str:
    counts = [len([1 for at, _ in run.micro_batches if at == step]) for run in (one, two)]
    if counts[0] == counts[1]:
        return ""
    return (
        f"the runs diverge at step {step}: {counts[0]} micro-batches in the first run, {counts[1]} "
        "in the second. The runs have different settings, or a rank's file is missing"
    )


def _step_parts(one: Bits, two: Bits, step: int, numbers: list[int]) -> str:
    for number in numbers:
        left, right = one.micro_batches[step, number], two.micro_batches[step, number]
        text = _micro_batch_parts(f"step {step}, micro-batch {number}", left, right)
        if text:
            return text
    return _norms_part(one, two, step)


def _micro_batch_parts(where: str, left: MicroBatch, right: MicroBatch) -> str:
    before, after = left.gradients, right.gradients
    parted = [name for name in before if name in after and before[name] != after[name]]
    other = sorted(set(before) ^ set(after))
    name = (other or parted or [""])[0]
    ranks = f"rank {left.rank_of(name)} in the first run, rank {right.rank_of(name)} in the second"
    if other:
        return f"the runs diverge at {where}: only one has a gradient of {name!r} ({ranks})"
    if parted or left.loss != right.loss:
        return _story(where, ranks, left.loss != right.loss, parted, len(before))
    return ""


def _story(where: str, ranks: str, loss: bool, parted: list[str], total: int) -> str:
    what = "the loss" if loss else "the loss is the same"
    if parted:
        what += f", and {len(parted)} of {total} gradients differ, first in the model's order: "
        what += repr(parted[0])
    return (
        f"the runs diverge at {where}: {what} ({ranks})\n"
        + ("the forward differs: data, weights or random numbers, or its kernels" if loss
           else "the forward agrees, so the backward differs")
    )  # fmt: skip


def _norms_part(one: Bits, two: Bits, step: int) -> str:
    left, right = one.norms.get(step, {}), two.norms.get(step, {})
    values = sorted(set(left.values()) | set(right.values()))
    if not left or not right or len(values) == 1:
        return ""
    usual = next(iter(left.values()))
    for run, norms in (("first", left), ("second", right)):
        for rank, value in sorted(norms.items()):
            if value != usual:
                return (
                    f"the runs diverge at step {step}: every micro-batch agrees, the norm of the "
                    f"reduced gradients does not (rank {rank} of the {run} run)\n"
                    "the reduction differs"
                )
    return ""
