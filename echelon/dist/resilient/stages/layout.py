"""Determine which parts of the whole model each rank of a world holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.dist.group import ProcessGroup
from echelon.dist.resilient.copies.parts import Part

CURE = "make stages with split(), which keeps the model's names, or pass Stage(prefix=...)"


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's part of a tensor.

    Attributes:
        shape: the shape of the full tensor.
        dtype: the dtype's name.
        start: the index of the part's first element in the flattened tensor.
        length: the number of elements in the part.
        stage: the index of the stage that holds the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int
    stage: int = 0

    @property
    def kind(self) -> str:
        """The full tensor's dtype and shape, for error messages."""
        return f"{self.dtype}{list(self.shape)}"


Row = dict[str, Holding]  # of one rank, by name


class Layout:
    """The parts that the ranks of a world hold.

    Args:
        rows: for each rank, its parts, by tensor name.
        ranks: the number that the launcher gave to each rank.
        stages: the indices of each rank's stages, including stages without tensors. None means
            only the stages to which the rank's parts belong.

    Attributes:
        sets: sets of ranks, by position in `rows`, that hold the same parts of the same stages.
        kinds: the dtype and shape of each tensor of the whole model, by name.
        shared: for each part that several ranks hold, a description for error messages. The key is
            the tensor's name, the part's first element and its number of elements.

    Raises:
        ValueError: ranks hold different tensors under one name, parts overlap, or some elements are
            held by no rank.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        ranks: Sequence[int],
        stages: Sequence[Sequence[int]] | None = None,
    ) -> None:
        holders: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            for name in row:
                holders.setdefault(name, []).append(place)
        self.kinds: dict[str, str] = {}
        for name, places in holders.items():
            self.kinds[name] = rows[places[0]][name].kind
            for place in places:
                if rows[place][name].kind != self.kinds[name]:
                    raise ValueError(
                        f"{name!r} is {self.kinds[name]} on rank {ranks[places[0]]}, but "
                        f"{rows[place][name].kind} on rank {ranks[place]}: {CURE}"
                    )
            _check_covered(name, [rows[place][name] for place in places])
        self.sets = _sets(rows, stages or [()] * len(rows))
        counts = Counter((name, one.start, one.length) for row in rows for name, one in row.items())
        self.shared = {
            (name, start, length): f"{name!r}, elements {start} to {start + length - 1},"
            if length < math.prod(rows[holders[name][0]][name].shape)
            else f"{name!r}"
            for (name, start, length), count in counts.items()
            if count > 1 and length
        }

    @classmethod
    def agreed(cls, parts: dict[str, Part], stages: Sequence[int], group: ProcessGroup) -> Layout:
        """Exchange descriptions of the parts that a group's ranks hold, and return the layout.

        Collective.

        Raises:
            ValueError: the parts do not form a valid layout; see `Layout`.
            CollectiveError: a rank was lost.
        """
        mine = {
            name: [list(one.shape), _dtype(one), one.start, one.length, one.stage]
            for name, one in parts.items()
        }
        told = group.all_gather_object([mine, list(stages)])
        rows = [
            {name: Holding(tuple(shape), *others) for name, (shape, *others) in row.items()}
            for row, _ in told
        ]
        return cls(rows, group.ranks, [indices for _, indices in told])

    def check_same_model(self, before: Layout) -> None:
        """Check that this layout and an earlier world's layout consist of the same tensors.

        Raises:
            ValueError: a tensor was removed or added, or its shape or dtype has changed.
        """
        for name in sorted(before.kinds.keys() | self.kinds.keys()):
            was, now = before.kinds.get(name), self.kinds.get(name)
            if was != now:
                raise ValueError(
                    "build must make the same whole model in every world, but "
                    f"{name!r} was {was or 'absent'} in the previous world, and is "
                    f"{now or 'absent'} now"
                )


def _dtype(part: Part) -> str:
    return str(part.data.dtype).removeprefix("torch.")


def _check_covered(name: str, found: Sequence[Holding]) -> None:
    """Check that the distinct parts of a tensor cover each of its elements exactly once."""
    end = 0
    for start, length in sorted({(one.start, one.length) for one in found if one.length}):
        if start > end:
            raise ValueError(f"no rank holds elements {end} to {start - 1} of {name!r}")
        if start < end:
            raise ValueError(
                f"ranks hold different parts of {name!r} that overlap: divide each stage in the "
                "same way in all replicas"
            )
        end = start + length
    numel = math.prod(found[0].shape)
    if end != numel:
        raise ValueError(f"no rank holds elements {end} to {numel - 1} of {name!r}")


def _sets(rows: Sequence[Row], stages: Sequence[Sequence[int]]) -> list[list[int]]:
    sets: dict[Any, list[int]] = {}
    for place, (row, indices) in enumerate(zip(rows, stages, strict=True)):
        held = frozenset((name, one.start, one.length, one.stage) for name, one in row.items())
        sets.setdefault((held, tuple(indices)), []).append(place)
    return list(sets.values())
