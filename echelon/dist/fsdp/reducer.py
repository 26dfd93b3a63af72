"""Reducer: all reductions of one backward, in flight together, and the exchange that ends them.

At the end every rank says which units it gathered and reduced in which order (a hash), and which
parameters it had gradients for. A rank that went another way is named, and a parameter without a
gradient on any rank keeps its `.grad`, which tells the optimizer to leave it alone.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

from echelon.dist.fsdp.flat import Flat, Member
from echelon.dist.fsdp.reduction import Reduction
from echelon.dist.group import ProcessGroup
from echelon.errors import CollectiveError, CollectiveMismatchError

if TYPE_CHECKING:
    from echelon.dist.fsdp.driver import Driver
    from echelon.dist.fsdp.unit import Unit

_MAX_IN_FLIGHT = 2


class Reducer:
    """Reduces units in the order of `start`, which is the same on all ranks."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._filling: dict[Flat, Reduction] = {}
        self._flying: deque[Reduction] = deque()
        self._all: list[Reduction] = []

    def collect(self, member: Member) -> None:
        """Take a gradient that autograd has just finished."""
        self._reduction(member.flat).collect(member)

    def start(self, unit: Unit) -> None:
        """Begin to reduce a unit's gradients. Blocks only if too many are in flight."""
        for flat in unit.flats:
            if not flat.trains:
                continue
            reduction = self._reduction(flat)
            del self._filling[flat]
            self._driver.note("reduce", flat.number)
            try:
                self._advance(_MAX_IN_FLIGHT - 1)
                reduction.start()
            except CollectiveError as err:
                raise self._driver.explain(err, f"reducing the gradients of {unit}") from None
            self._flying.append(reduction)
            self._all.append(reduction)

    def finish(self) -> None:
        """Wait for all of them and give the shards their gradients.

        Raises:
            CollectiveMismatchError: a rank went through the units in another order.
            CollectiveError: a rank is lost or did not come.
        """
        if not self._all:
            return
        members = [member for one in self._all for member in one.flat.members]
        mine = [member in one.present for one in self._all for member in one.flat.members]
        try:
            present = self._exchange(mine)
            self._advance(0)
        except CollectiveError as err:
            raise self._driver.explain(err, "reducing the last gradients") from None
        some = {member for member, flag in zip(members, present, strict=True) if flag}
        for reduction in self._all:
            reduction.settle(some.intersection(reduction.flat.members))

    def _reduction(self, flat: Flat) -> Reduction:
        if flat not in self._filling:
            driver = self._driver
            self._filling[flat] = Reduction(flat, driver.pool, driver.reducer, driver.replicas)
        return self._filling[flat]

    def _advance(self, limit: int) -> None:
        """Go on with what flies, in its order; block while more than `limit` do."""
        while self._flying and self._flying[0].advance(block=len(self._flying) > limit):
            self._flying.popleft()

    def _exchange(self, present: list[bool]) -> list[bool]:
        driver = self._driver
        device = self._all[0].flat.device
        hashes = list(driver.hashes.values())
        message = torch.tensor([*hashes, *present], dtype=torch.int64).to(device)
        rows = _gather(driver.reducer, message)
        _check([tuple(row[: len(hashes)]) for row in rows], driver.reducer)
        columns = zip(*(row[len(hashes) :] for row in rows), strict=True)
        flags = [any(column) for column in columns]
        if driver.replicas is not None:
            self._advance(0)  # their all_reduces come first, on all of them
            across = torch.tensor(flags, dtype=torch.int64).to(device)
            rows = _gather(driver.replicas, across)
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
        f"{names} went through the units of group {group.name!r} in another order than the others "
        f"since the last step: does its forward depend on its data?",
        group=group.name,
        operation="backward",
        ranks=strays,
    )
