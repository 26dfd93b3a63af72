"""Reduce the gradients of one flat vector, and store the result in the shards' `.grad`.

    leaf.grad --copy--> buffer [group_size * chunk_numel] --reduce_scatter--> sums [chunk_numel]
              (pooled, in the dtype of the reduction)        --all_reduce over the replicas-->
              --> shard.grad

The buffer always has its full size, and contains zeros for gradients that are missing on this rank.
All ranks therefore reduce the same amount of data.
"""

from __future__ import annotations

import torch

from echelon.dist.fsdp.memory.storage import Pool
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.layout import tagged_shape
from echelon.dist.fsdp.parameters.member import Member, mark
from echelon.dist.group import ProcessGroup
from echelon.dist.work import Work

_SMALL = 8


class Reduction:
    """The gradients of one flat vector in one backward pass.

    Args:
        flat: the flat vector whose gradients are reduced.
        pool: the source of buffers.
        group: the group used for reductions, with the same ranks as the group of `flat`.
        replicas: the ranks that hold the same chunk as this rank, or None.
    """

    def __init__(
        self, flat: Flat, pool: Pool, group: ProcessGroup, replicas: ProcessGroup | None
    ) -> None:
        self.flat = flat
        self.present: set[Member] = set()
        self._pool = pool
        self._group = group
        self._replicas = replicas
        self._buffer: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None  # [chunk_numel], dtype of the reduction
        self._work: Work | None = None
        self._is_across = False

    def collect(self, member: Member) -> None:
        """Copy a gradient into the buffer, and free the gradient.

        Before the buffer is allocated, small gradients are left in `.grad`, and `start` collects
        them.
        """
        gradient = member.leaf.grad
        assert gradient is not None, member.name
        if member.aside is not None:
            member.set_aside()
            self._copy(member, member.aside)
            return
        if self._buffer is None and _SMALL * gradient.numel() < self.flat.layout.numel:
            return
        self._copy(member, gradient)

    def start(self) -> None:
        """Collect the remaining gradients, set missing ones to zero, and start the reduction."""
        for member in self.flat.members:
            if member.aside is not None:
                member.set_aside()
            gradient = member.leaf.grad if member.aside is None else member.aside
            if gradient is not None:
                self._copy(member, gradient)
        buffer = self._take_buffer()
        for member in self.flat.members:
            if member not in self.present:
                member.within(buffer).zero_()
        # From the heap, which has what activations leave: mapped, it would come on top of them.
        flat = self.flat
        self._sums = torch.empty(
            flat.layout.chunk_numel, dtype=flat.reduce_dtype, device=flat.device
        )
        numel, op = buffer.numel(), "avg" if self._replicas is None else "sum"
        shape = tagged_shape(numel, flat.number)
        self._work = self._group.reduce_scatter(
            self._sums, buffer.view(shape), op=op, async_op=True
        )

    def cross(self) -> None:
        """Wait for the sum over this group, and then start the sum over the replicas.

        [Note: launches of two levels] Device libraries require all ranks to launch the collectives
        of several communicators in the same order. The start of the second sum therefore depends
        only on the order of reductions, not on timing.
        """
        if self._replicas is None or self._is_across or self._work is None:
            return
        self._end_level()
        self._is_across = True
        assert self._sums is not None
        self._work = self._replicas.all_reduce(self._sums, op="sum", async_op=True)

    def advance(self, *, block: bool) -> bool:
        """Advance as far as possible without blocking, or to the end if `block` is set.

        Returns:
            Whether the reduction is complete.
        """
        if block:
            self.cross()
        if self._work is not None:
            waits_for_order = self._replicas is not None and not self._is_across
            if not block and (waits_for_order or not self._work.done):
                return False
            self._end_level()
        if all(member.shard.grad is not None for member in self.flat.members):
            self.settle(set(self.flat.members))  # adding nothing to a gradient changes nothing
        return True

    def _end_level(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None

    def settle(self, present: set[Member]) -> None:
        """Set, or add to, the `.grad` of each shard for which any rank has a gradient."""
        if self._sums is None:
            return  # done already
        sums, self._sums = self._sums, None
        if self._replicas is not None:
            sums.div_(self._group.size * self._replicas.size)
        sums = sums.to(self.flat.chunk.device, self.flat.dtype)
        for member in present:
            mine = member.of(sums)
            if member.shard.grad is None:
                member.shard.grad = mark(mine)
            else:
                member.shard.grad.add_(mine)

    def _take_buffer(self) -> torch.Tensor:
        if self._buffer is None:
            flat = self.flat
            self._buffer = self._pool.acquire(flat.layout.numel, flat.reduce_dtype, flat.device)
        return self._buffer

    def _copy(self, member: Member, gradient: torch.Tensor) -> None:
        place = member.within(self._take_buffer())
        if member in self.present:  # a second graph reached it in the same backward
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self.present.add(member)
        member.drop_gradient()
