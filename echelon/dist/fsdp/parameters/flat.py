"""Store a unit's parameters of one dtype as one flat vector, which is sharded across the ranks.

[Note: the tensors in play]

    full     [group_size * chunk_numel]   the full vector, in the dtype of the computation; its
                                          memory is allocated only while the unit is gathered
    chunk    [chunk_numel]                this rank's range of the vector, in the dtype of the
                                          shards; always in memory, and not a view of `full`
    leaf     the parameter's shape        an nn.Parameter, a view of `full`; used by forward and
                                          backward
    shard    [length, 1, ...]             an nn.Parameter, a view of `chunk`: this rank's shard of
                                          the parameter, with the same number of dims. This is the
                                          Python object that the module had before sharding, so
                                          optimizers created earlier continue to work
    aside    the parameter's shape        unreduced gradients of earlier micro-batches, if they
                                          are summed in a dtype other than the leaf's
    sums     [chunk_numel]                this rank's range of the reduced gradients;
                                          `shard.grad` is a view of it

The module's attribute is the leaf while the unit is gathered. At all other times it is the shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.dist import heap
from echelon.dist.fsdp.memory.storage import PAGE_BYTES, HostStorage, Memory
from echelon.dist.fsdp.parameters.layout import Layout, plan_layout, tagged_shape
from echelon.dist.fsdp.parameters.member import Member, Source
from echelon.dist.fsdp.settings import CPUOffloadPolicy
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.absent import is_absent
from echelon.dist.work import Work

# [Note: no released memory is read] Added to a leaf's version while its memory is released.
# Autograd compares versions when it takes out what it saved in forward, so a backward that reaches
# a parameter which is not there raises ("modified by an inplace operation ... is at version
# 1000000000") instead of computing with zeros. When the unit is gathered, the version is as before,
# or one more if the shard changed since: a backward through weights that were changed after their
# forward raises too, as it does for a plain parameter.
_RELEASED = 1_000_000_000


class Flat:
    """A flat vector of parameters, which is sharded across ranks.

    Args:
        sources: the parameters, all of one dtype and on one device.
        group: the ranks across which the vector is sharded.
        number: the number of this flat vector within its group.
        compute_dtype: the dtype of the computation; None means the dtype of the shards.
        reduce_dtype: the dtype of the reduction; None means the dtype of the computation.
        offload: whether to keep the chunk in host memory.
        replicas: the ranks that keep a copy of this rank's chunk, or None.
        memory: the memory that all flat vectors of the group share.

    Attributes:
        replicas: the ranks that keep a copy of this rank's chunk, or None.
        keeps_memory: whether `release` leaves the host memory of `full` allocated for the next
            gather.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        group: ProcessGroup,
        number: int,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        offload: CPUOffloadPolicy | None,
        replicas: ProcessGroup | None,
        memory: Memory,
    ) -> None:
        first = sources[0].parameter
        if first.device.type == "cpu":
            heap.keep()
        self.group = group
        self.replicas = replicas
        self.keeps_memory = False
        self.dtype = first.dtype
        self.device = first.device
        self.compute_dtype = compute_dtype or first.dtype
        self.reduce_dtype = reduce_dtype or self.compute_dtype
        self.layout = self._plan([source.parameter.shape for source in sources])
        self._memory = memory  # shared: it lives as long as the flats that use it
        self.full = memory.make_storage(self.layout.numel, self.compute_dtype, self.device)
        self.full.take()
        self._offload = offload if self.device.type != "cpu" else None
        self._alike = self.compute_dtype == self.dtype and self._offload is None
        self.chunk = self._resident()
        self._fill(sources, replicas)
        self.members = [
            Member(self, source, piece, self.layout.part(index, group.rank))
            for index, (source, piece) in enumerate(zip(sources, self.layout.pieces, strict=True))
        ]
        self.number = number
        self._works: list[Work] = []
        self._versions: tuple[int, ...] | None = None  # of the leaves, while they are released
        self._shown: tuple[int, ...] | None = None  # of the leaves, when they were shown
        self._kept: torch.Tensor | None = None  # what a device keeps for the near ranks
        self.release()

    @property
    def trains(self) -> bool:
        """True if any of the parameters requires gradients."""
        return any(member.leaf.requires_grad for member in self.members)

    @property
    def full_bytes(self) -> int:
        """The size of the full vector in bytes."""
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The size in bytes of the buffer used to reduce the gradients."""
        return self.layout.numel * self.reduce_dtype.itemsize

    # ---- parameters ----

    def start_gather(self) -> None:
        """Start gathering all ranks' chunks into `full`.

        Raises:
            ValueError: a shard was converted or moved.
        """
        for member in self.members:
            member.note_gather()
        self.full.take()
        mine = self.chunk
        if not self._alike:
            mine = self._part_of_full(self.group.rank, self.group.size)
            mine.copy_(self.chunk, non_blocking=True)
        if self.group.size > 1:
            shape = tagged_shape(mine.numel(), self.number)
            work = self.group.all_gather(self.full.tensor, mine.view(shape), async_op=True)
            self._works.append(_work(work))
        elif self._alike:
            self.full.tensor.copy_(mine)

    def start_regather(self, near: ProcessGroup) -> None:
        """Start gathering into `full` the ranges that the neighboring ranks have retained."""
        self.full.take()
        mine = self._part_of_full(near.rank, near.size)
        if self._kept is not None:
            mine.copy_(self._kept)
            self._kept = None
        if near.size > 1:
            shape = tagged_shape(mine.numel(), self.number)
            work = near.all_gather(self.full.tensor, mine.view(shape), async_op=True)
            self._works.append(_work(work))

    def wait(self) -> None:
        """Block until all gathers into `full` are complete."""
        while self._works:
            self._works.pop(0).wait()

    def show_leaves(self) -> None:
        """Make the modules use full parameters, which take `requires_grad` from the shards.

        Raises:
            ValueError: the program replaced a parameter.
        """
        if self._versions is not None:
            moves = [member.take_move() for member in self.members]
            self._shown = tuple(map(sum, zip(self._versions, moves, strict=True)))
            _set_versions(self.members, self._shown)
            self._versions = None
        for member in self.members:
            member.show_leaf()

    def show_shards(self) -> None:
        """Make the modules use the shards; each shard takes over `requires_grad` from its leaf."""
        for member in self.members:
            member.show_shard()

    def adopt(self) -> None:
        """Copy into the chunk the values that the program assigned with `shard.data = values`.

        Raises:
            ValueError: a shard was converted or moved.
        """
        for member in self.members:
            member.adopt()

    def release(self, near: ProcessGroup | None = None) -> None:
        """Release the memory of `full`, except for the range retained for neighboring ranks.

        If the program changed full parameters in place, the new values are first copied into the
        shards.
        """
        if self._versions is None:
            self._versions = tuple(member.leaf._version for member in self.members)
            shown = self._shown or self._versions
            _set_versions(self.members, [version + _RELEASED for version in self._versions])
            for member, was, now in zip(self.members, shown, self._versions, strict=True):
                member.check_leaf(was_written=was != now)
        keep = []
        if self.keeps_memory:
            keep.append((0, self.layout.numel))
        elif near is not None:
            keep.append(self._range(near.rank, near.size))
            if self.device.type != "cpu":
                self._kept = self._part_of_full(near.rank, near.size).clone()
        self.full.release(keep)

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of the gathered parameters."""
        if tensor.device != self.device or not tensor.numel():
            return False
        first = self.full.tensor.data_ptr()
        try:
            return first <= tensor.data_ptr() < first + self.full_bytes
        except RuntimeError:  # a wrapper without memory of its own
            return False

    # ---- making ----

    def move(
        self, group: ProcessGroup, replicas: ProcessGroup | None, number: int, memory: Memory
    ) -> None:
        """Shard the vector across the ranks of another group. The vector's values become undefined.

        Args:
            group: the ranks to shard the vector across.
            replicas: the ranks that keep a copy of this rank's new chunk, or None.
            number: the number of this flat vector within the new group.
            memory: the memory that all flat vectors of the new group share.
        """
        self._works.clear()
        self.group, self.replicas, self.number = group, replicas, number
        self.layout = self._plan([piece.shape for piece in self.layout.pieces])
        self._memory = memory
        self.full = memory.make_storage(self.layout.numel, self.compute_dtype, self.device)
        self.chunk = self._resident()
        for index, member in enumerate(self.members):
            member.move(self.layout.pieces[index], self.layout.part(index, group.rank))
        self._kept = None
        if self._versions is None:
            self._versions = tuple(member.leaf._version for member in self.members)
            _set_versions(self.members, [version + _RELEASED for version in self._versions])

    def _plan(self, shapes: Sequence[Sequence[int]]) -> Layout:
        itemsize = min(self.dtype.itemsize, self.compute_dtype.itemsize)
        return plan_layout(shapes, itemsize, self.group.size, PAGE_BYTES)

    def _resident(self) -> torch.Tensor:
        """Return a new chunk-sized tensor with the dtype and device of the shards."""
        numel = self.layout.chunk_numel
        if self.device.type == "cpu":
            return HostStorage(numel, self.dtype).tensor
        if self._offload is not None:
            return torch.zeros(numel, dtype=self.dtype, pin_memory=self._offload.pin_memory)
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _fill(self, sources: Sequence[Source], replicas: ProcessGroup | None) -> None:
        """Fill this rank's chunk with the parameter values of group rank 0. Collective."""
        if is_absent(self.group):
            return  # the values come from the ranks that this one joins
        whole = None
        if self.group.rank == 0:
            whole = self.full.tensor if self.compute_dtype == self.dtype else make_whole(self)
            for source, piece in zip(sources, self.layout.pieces, strict=True):
                values = source.parameter.detach().reshape(-1)
                whole[piece.start : piece.start + piece.numel].copy_(values)
        chunk = self.chunk.to(self.device)
        if self.group.size > 1:
            self.group.scatter(chunk, whole, root=0)
        elif whole is not None and chunk.data_ptr() != whole.data_ptr():
            chunk.copy_(whole)
        if replicas is not None:
            replicas.broadcast(chunk, root=0)
        if chunk.data_ptr() != self.chunk.data_ptr():
            self.chunk.copy_(chunk)

    def _part_of_full(self, rank: int, size: int) -> torch.Tensor:
        first, last = self._range(rank, size)
        return self.full.tensor[first:last]

    def _range(self, rank: int, size: int) -> tuple[int, int]:
        numel = self.layout.numel // size
        return rank * numel, (rank + 1) * numel


def _set_versions(members: Sequence[Member], versions: Sequence[int]) -> None:
    leaves = tuple(member.leaf for member in members)
    torch._C._autograd._unsafe_set_version_counter(leaves, tuple(versions))


def make_whole(flat: Flat) -> torch.Tensor:
    """Return a zero-filled tensor for the full vector, in the shards' dtype.

    On the host, no pages are allocated until the tensor is accessed.
    """
    if flat.device.type == "cpu":
        return HostStorage(flat.layout.numel, flat.dtype).tensor
    return torch.zeros(flat.layout.numel, dtype=flat.dtype, device=flat.device)


def _work(work: Work | None) -> Work:
    assert work is not None
    return work
