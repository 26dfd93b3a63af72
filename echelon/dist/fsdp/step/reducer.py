"""Run all reductions of one backward pass concurrently.

At the end of the backward pass, the ranks compare hashes of the order in which they gathered and
reduced units. On a mismatch, the error names the ranks whose order differs from the most common
order. The ranks also tell each other which parameters have gradients. If no rank has a gradient for
a parameter, the parameter's `.grad` is left unchanged.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from echelon.dist.fsdp.memory.storage import Pool
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.member import Member
from echelon.dist.fsdp.parameters.unit import Unit
from echelon.dist.fsdp.step.reduction import Reduction
from echelon.dist.group import ProcessGroup
from echelon.errors import CollectiveMismatchError


class Reducer:
    """The reductions of one backward pass. All ranks must start the units in the same order.

    Args:
        pool: the source of buffers.
        group: the group used for reductions.
        replicas: the ranks that hold the same chunk as this rank, or None.
        note: a function that is called as `note("reduce", flat_number)` when a reduction begins.
    """

    def __init__(
        self,
        pool: Pool,
        group: ProcessGroup,
        replicas: ProcessGroup | None,
        note: Callable[[str, int], None],
    ) -> None:
        self._pool = pool
        self._group = group
        self._replicas = replicas
        self._note = note
        self._filling: dict[Flat, Reduction] = {}
        self._flying: deque[Reduction] = deque()
        self._all: list[Reduction] = []

    def collect(self, member: Member) -> None:
        """Add a newly computed gradient to its reduction."""
        self._reduction(member.flat).collect(member)

    def start(self, unit: Unit) -> None:
        """Start reducing a unit's gradients.

        Raises:
            CollectiveError: a rank was lost, did not join, or is reducing a different unit.
        """
        for flat in unit.flats:
            if not flat.trains:
                continue
            reduction = self._reduction(flat)
            del self._filling[flat]
            self._note("reduce", flat.number)
            for earlier in self._flying:
                earlier.cross()
            self._advance(len(self._flying))
            reduction.start()
            self._flying.append(reduction)
            self._all.append(reduction)

    def finish_first(self, unit: Unit) -> None:
        """Block until a unit's reductions and all earlier reductions are complete.

        Raises:
            CollectiveError: a rank was lost or did not join.
        """
        last = max((i for i, one in enumerate(self._flying) if one.flat in unit.flats), default=-1)
        self._advance(len(self._flying) - last - 1)

    def finish(self, hashes: Sequence[int]) -> None:
        """Wait for all reductions and set the shards' gradients.

        Args:
            hashes: this rank's running hashes of gathers and reductions.

        Raises:
            CollectiveMismatchError: a rank gathered or reduced units in a different order.
            CollectiveError: a rank was lost or did not join.
        """
        if not self._all:
            return
        members = [member for one in self._all for member in one.flat.members]
        mine = [member in one.present for one in self._all for member in one.flat.members]
        present = self._exchange(hashes, mine)
        self._advance(0)
        some = {member for member, flag in zip(members, present, strict=True) if flag}
        for reduction in self._all:
            reduction.settle(some.intersection(reduction.flat.members))
        for member in members:
            if member in some:
                member.call_hooks()

    def _reduction(self, flat: Flat) -> Reduction:
        if flat not in self._filling:
            self._filling[flat] = Reduction(flat, self._pool, self._group, self._replicas)
        return self._filling[flat]

    def _advance(self, limit: int) -> None:
        """Advance the reductions in order, and block while more than `limit` are in progress."""
        while self._flying and self._flying[0].advance(block=len(self._flying) > limit):
            self._flying.popleft()

    def _exchange(self, hashes: Sequence[int], present: list[bool]) -> list[bool]:
        device = self._all[0].flat.device
        message = torch.tensor([*hashes, *present], dtype=torch.int64).to(device)
        rows = _gather(self._group, message)
        _check([tuple(row[: len(hashes)]) for row in rows], self._group)
        columns = zip(*(row[len(hashes) :] for row in rows), strict=True)
        flags = [any(column) for column in columns]
        if self._replicas is not None:
            self._advance(0)  # their all_reduces come first, on all of them
            across = torch.tensor(flags, dtype=torch.int64).to(device)
            rows = _gather(self._replicas, across)
            flags = [any(column) for column in zip(*rows, strict=True)]
        return flags


def _gather(group: ProcessGroup, message: torch.Tensor) -> list[list[int]]:
    rows = message.new_empty(group.size * message.numel())
    group.all_gather(rows, message)
    result: list[list[int]] = rows.view(group.size, -1).tolist()
    return result


def _check(hashes: list[tuple[int, ...]], group: ProcessGroup) -> None:
    if len(set(hashes)) == 1:
        return
    usual = Counter(hashes).most_common(1)[0][0]
    strays = [group.ranks[index] for index, one in enumerate(hashes) if one != usual]
    names = ", ".join(f"rank {rank}" for rank in strays)
    raise CollectiveMismatchError(
        f"{names} ran the units of group {group.name!r} in a different order from the other ranks "
        "since the last step: does the forward pass depend on the data?",
        group=group.name,
        operation="backward",
        ranks=strays,
    )
