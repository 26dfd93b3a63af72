"""Assemble each matrix from its shards on one rank, and return the update's shards to all ranks.

[Note: rounds]

    shards of      A B C D ...     costliest first
    round 0        rank 0 gets A, rank 1 gets B           one all_to_all: shards to owners
                   each owner computes                    adjacent matrices cost about the same
                   owners return the updates' shards      one all_to_all: shards of the updates
    round 1        C, D ...

A rank holds one full matrix at a time. For each matrix, a rank sends its shard and receives the
update of that shard; the owner receives the full matrix and sends the shards of the update.

The R replicas of a mesh take turns: replica k computes rounds k, k + R, ... and broadcasts the
results. The work is thus split across all ranks, and all replicas get the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.member import Member, member_of
from echelon.dist.group import ProcessGroup
from echelon.train.optimizers.newton_schulz import num_products

T = TypeVar("T")


@dataclass(eq=False)
class Matrix:
    """A matrix of which this rank holds a shard.

    Attributes:
        shape: the shape of the full matrix.
        lengths: the number of elements that each rank of the group holds.
        momentum: a function that returns this rank's shard of the momentum, in any shape. It is
            called in the round in which the matrix is processed; see [Note: rounds].
        compute: a function that is called on the owner with the full matrix and returns a matrix
            of the same size.
        apply: a function that is called with this rank's shard of the result, a 1-dim tensor.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    momentum: Callable[[], Tensor]
    compute: Callable[[Tensor], Tensor]
    apply: Callable[[Tensor], None]


@dataclass
class Bucket:
    """A set of matrices whose shards are on the same ranks.

    Args:
        group: the ranks that hold the shards.
        replicas: the ranks that hold copies of this rank's shards; None means that there are no
            replicas.
        device: the device on which to compute.
    """

    group: ProcessGroup
    replicas: ProcessGroup | None
    device: torch.device
    matrices: list[Matrix] = field(default_factory=list)

    def run(self, dtype: torch.dtype) -> None:
        """Call `compute` with each full matrix, and `apply` with this rank's shard of each result.

        Collective over the group and its replicas. Blocks until all ranks have joined, or until a
        group's timeout expires.

        Args:
            dtype: the dtype in which matrices are exchanged and passed to `compute`.

        Raises:
            CollectiveError: a rank was lost, did not join, or has different matrices.
        """
        ordered = sorted(self.matrices, key=lambda one: -num_products(one.shape))
        rounds = [*_slices(ordered, self.group.size)]
        index = 0 if self.replicas is None else self.replicas.rank
        num_replicas = 1 if self.replicas is None else self.replicas.size
        for turn in _slices(rounds, num_replicas):
            results = [
                self._one_round(one, dtype, is_mine=number == index)
                for number, one in enumerate(turn)
            ]
            for number, result in enumerate(results):
                if self.replicas is not None and result.numel():
                    self.replicas.broadcast(result, root=number)
            for one, result in zip(turn, results, strict=True):
                self._apply(one, result)

    def _apply(self, matrices: Sequence[Matrix], result: Tensor) -> None:
        start = 0
        for matrix in matrices:
            length = matrix.lengths[self.group.rank]
            matrix.apply(result[start : start + length])
            start += length

    def _one_round(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, *, is_mine: bool
    ) -> Tensor:
        """Return this rank's shards of a round's results.

        If this replica does not compute the round (`is_mine` is False), the values are undefined.
        """
        # A replica's momentum moves in every round, whichever rank computes.
        parts = [matrix.momentum().reshape(-1).to(self.device, dtype) for matrix in matrices]
        sent = torch.cat(parts)
        if not is_mine:
            return torch.empty_like(sent)
        own = matrices[self.group.rank] if self.group.rank < len(matrices) else None
        to_owners = [part.numel() for part in parts] + [0] * (self.group.size - len(matrices))
        from_ranks = [0] * self.group.size if own is None else list(own.lengths)
        whole = self._exchange(sent, to_owners, from_ranks)
        if own is not None:
            whole = own.compute(whole.view(own.shape)).reshape(-1)
        return self._exchange(whole, from_ranks, to_owners)

    def _exchange(self, given: Tensor, to_ranks: list[int], from_ranks: list[int]) -> Tensor:
        if self.group.size == 1:
            return given
        received = given.new_empty(sum(from_ranks))
        self.group.all_to_all(received, given.contiguous(), from_ranks, to_ranks)
        return received


class Buckets:
    """All buckets, in the order in which they were created; see `Bucket`."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Bucket] = {}
        self._indices: dict[Flat, dict[Member, int]] = {}

    def add(
        self,
        shard: Tensor,
        momentum: Callable[[], Tensor],
        compute: Callable[[Tensor], Tensor],
        apply: Callable[[Tensor], None],
    ) -> None:
        """Add the matrix to which a shard belongs; see `Matrix`."""
        member = member_of(shard)
        assert member is not None, shard.shape
        flat = member.flat
        bucket = self._found.setdefault(
            (flat.group, flat.replicas, flat.device),
            Bucket(flat.group, flat.replicas, flat.device),
        )
        bucket.matrices.append(
            Matrix(member.piece.shape, self._lengths(flat, member), momentum, compute, apply)
        )

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._found.values())

    def _lengths(self, flat: Flat, member: Member) -> tuple[int, ...]:
        if flat not in self._indices:
            self._indices[flat] = {one: index for index, one in enumerate(flat.members)}
        index = self._indices[flat][member]
        return tuple(flat.layout.part(index, rank).length for rank in range(flat.group.size))


def _slices(items: Sequence[T], size: int) -> Iterator[list[T]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
