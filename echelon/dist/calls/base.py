"""The base of a group's calls: its members, checks of ranks, and how operations are passed on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from echelon.dist.backends.interface import Members
from echelon.dist.operation.arrays import View, view
from echelon.dist.operation.checks import check_rank
from echelon.dist.work import Work

Timeout: TypeAlias = float | None
Splits: TypeAlias = Sequence[int] | None


class Calls(ABC):
    """Base of the groups of calls; `ProcessGroup` carries their operations out."""

    _members: Members

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._members.rank

    @property
    def size(self) -> int:
        """The number of members."""
        return self._members.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, in group order."""
        return tuple(self._members.ranks)

    @property
    def name(self) -> str:
        """The group's name, as verdicts show it."""
        return self._members.name

    @abstractmethod
    def _collective(
        self,
        kind: str,
        source: View | None,
        target: View | None,
        *,
        reduce_op: str = "",
        root: int = -1,
        input_splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
        splits: tuple[int, ...] = (),
        timeout_s: Timeout = None,
        async_op: bool = False,
    ) -> Work | None:
        """Carry out a checked collective."""

    @abstractmethod
    def _message(
        self, kind: str, peer: int, data: View, tag: int, *, timeout_s: Timeout, async_op: bool
    ) -> Work | None:
        """Carry out a checked send or receive.

        Returns the work of a blocking receive from any rank too: it knows the sender.
        """

    # ---- checks ----

    def _check_rank(self, rank: Any, name: str) -> int:
        return check_rank(rank, name, self.name, self.size)

    def _check_peer(self, rank: Any, name: str) -> int:
        number = self._check_rank(rank, name)
        if number == self.rank:
            raise ValueError(f"{name} {rank}: a rank cannot exchange messages with itself")
        return number

    def _rooted(self, array: Any, name: str, root: int, *, writable: bool) -> View | None:
        if root == self.rank:
            return view(array, name, writable=writable)
        if array is not None:
            raise ValueError(f"{name} is given by root {root} alone; pass None on rank {self.rank}")
        return None
