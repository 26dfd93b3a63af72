"""Reduce the gradients of several full or sharded parameters as one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from echelon.dist.canonical import (
    Run,
    Scratch,
    TreeSums,
    agree_runs,
    all_reduce,
    reduce_scatter,
    sum_dtype,
)
from echelon.dist.canonical.collective import even_splits
from echelon.dist.canonical.tree import Node
from echelon.dist.fsdp.parameters.flat import Flat
from echelon.dist.fsdp.parameters.layout import Layout
from echelon.dist.fsdp.parameters.member import mark, member_of
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.group import ProcessGroup

Taken = list[torch.Tensor | None]  # the gradient of each parameter of a vector, in its shape
Nodes = Sequence[tuple[Node, Taken]]

_NUMEL = 1 << 24  # of one vector of whole parameters: few large collectives cost least


class Vector(Protocol):
    """The gradients of several parameters, reduced as one vector.

    Attributes:
        dtype: the dtype of the sums.
        device: the device of the sums.
        owners: the parameters whose `.grad` the optimizer reads.
    """

    dtype: torch.dtype
    device: torch.device
    owners: list[nn.Parameter]

    def take(self) -> Taken:
        """Move one micro-batch's gradients out of `.grad`, and convert them to `dtype`."""

    def drop(self) -> None:
        """Discard the gradients of the micro-batches and of the last step."""

    def give(self, nodes: Nodes, present: Sequence[bool]) -> None:
        """Reduce all ranks' sums of gradients, and put the averages into `.grad`. Collective.

        Args:
            nodes: the nodes of the canonical tree that cover this rank's range, with their sums.
            present: for each parameter, whether any rank has a gradient for it.
        """


class WholeVector:
    """A vector for parameters that every rank holds in full.

    Args:
        parameters: parameters of the same dtype and on the same device.
        group: the ranks across which the micro-batches are split.
        runs: each rank's range of micro-batches.
        scratch: a receive buffer shared by all vectors.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: ProcessGroup,
        runs: Sequence[Run],
        scratch: Scratch,
    ) -> None:
        self.owners = parameters
        self.dtype = sum_dtype(parameters[0].dtype)
        self.device = parameters[0].device
        self._numel = sum(parameter.numel() for parameter in parameters)
        self._group = group
        self._runs = runs
        self._scratch = scratch

    def take(self) -> Taken:
        """Take one micro-batch's gradients; see `Vector`."""
        taken = [_summed(parameter.grad, self.dtype) for parameter in self.owners]
        self.drop()
        return taken

    def drop(self) -> None:
        """Drop all gradients; see `Vector`."""
        for parameter in self.owners:
            parameter.grad = None

    def give(self, nodes: Nodes, present: Sequence[bool]) -> None:
        """Reduce the sums; see `Vector`."""
        group, run = self._group, self._runs[self._group.rank]
        sums = _packed(nodes, run, self._numel, self.dtype, self.device, self._places, ())
        splits = even_splits(self._numel, group.size)
        mine = reduce_scatter(group, sums, self._runs, splits, scratch=self._scratch)
        average = mine.total().div_(run.total)
        if group.size > 1:
            block, average = average, _memory_of(sums)  # all its values have been sent
            group.all_gather(average, block, output_splits=splits)
        for parameter, place, flag in zip(self.owners, self._places(average), present, strict=True):
            parameter.grad = place.to(parameter.dtype) if flag else None

    def _places(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(vector, [parameter.numel() for parameter in self.owners])
        return [part.view(one.shape) for part, one in zip(parts, self.owners, strict=True)]


class ShardedVector:
    """A vector of gradients for a `fully_shard` unit.

    The unit stays gathered while micro-batches are processed.

    Args:
        flat: the unit's flat tensor, whose gradients the vector holds.
        run: this rank's range of micro-batches.
        scratch: a receive buffer shared by all vectors.
    """

    def __init__(self, flat: Flat, run: Run, scratch: Scratch) -> None:
        self.owners = [member.shard for member in flat.members]
        self.dtype = sum_dtype(flat.dtype)
        self.device = flat.device
        self._flat = flat
        self._run = run
        self._scratch = scratch
        self._runs = agree_runs(flat.group, run)
        self._across: tuple[Run, ...] | None = None
        if flat.replicas is not None:
            union = Run(self._runs[0].start, self._runs[-1].stop, run.total)
            self._across = agree_runs(flat.replicas, union)
        every = self._across or self._runs
        if (every[0].start, every[-1].stop) != (0, run.total):
            raise ValueError(
                f"the ranks of group {flat.group.name!r} and its replicas hold only "
                f"micro-batches {every[0].start} to {every[-1].stop - 1} of {run.total}: pass "
                "a group whose ranks hold all micro-batches"
            )

    def take(self) -> Taken:
        """Take one micro-batch's gradients; see `Vector`."""
        taken = []
        for member in self._flat.members:
            gradient = member.leaf.grad if member.aside is None else member.aside
            taken.append(_summed(gradient, self.dtype))
            member.drop_gradient()
        return taken

    def drop(self) -> None:
        """Drop all gradients; see `Vector`."""
        for member in self._flat.members:
            member.drop_gradient()
            member.shard.grad = None

    def give(self, nodes: Nodes, present: Sequence[bool]) -> None:
        """Reduce the sums; see `Vector`."""
        flat, run = self._flat, self._run
        gaps, numel = _gaps(flat.layout), flat.layout.numel
        sums = _packed(nodes, run, numel, self.dtype, self.device, self._places, gaps)
        splits = [flat.layout.chunk_numel] * flat.group.size
        mine = reduce_scatter(flat.group, sums, self._runs, splits, scratch=self._scratch)
        if flat.replicas is not None and self._across is not None:
            total = all_reduce(flat.replicas, mine, self._across)
        else:
            total = mine.total()
        average = total.div(run.total).to(flat.chunk.device, flat.dtype)  # out of the scratch
        for member, flag in zip(flat.members, present, strict=True):
            member.shard.grad = mark(member.of(average)) if flag else None
            if flag:
                member.call_hooks()

    def _places(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [member.within(vector) for member in self._flat.members]


def _summed(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().to(dtype)


def _gaps(layout: Layout) -> list[slice]:
    """Return the slices of a flat vector that do not belong to any parameter."""
    starts = [*(piece.start for piece in layout.pieces), layout.numel]
    ends = [0, *(piece.start + piece.numel for piece in layout.pieces)]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _memory_of(sums: TreeSums) -> torch.Tensor:
    """Return a vector from `sums` whose memory can be reused, or a new vector if `sums` is empty.

    All vectors in `sums` must already have been sent.
    """
    for _, vector in sums.nodes():
        return vector
    return torch.empty(sums.numel, dtype=sums.dtype, device=sums.device)


def _packed(
    nodes: Nodes,
    run: Run,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    places: Callable[[torch.Tensor], list[torch.Tensor]],
    gaps: Sequence[slice],
) -> TreeSums:
    """Pack each tree node's sums into its own vector; fill gaps and absent gradients with zeros."""
    vectors = []
    for node, taken in nodes:
        vector = torch.empty(numel, dtype=dtype, device=device)
        for gap in gaps:
            vector[gap].zero_()
        for place, gradient in zip(places(vector), taken, strict=True):
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient)
        vectors.append((node, vector))
    return TreeSums.joined(run, numel, TreeSums(run, numel, dtype, device), vectors)


def vectors_of(
    module: nn.Module, group: ProcessGroup, runs: Sequence[Run]
) -> list[WholeVector | ShardedVector]:
    """Return the vectors of all trainable parameters. Collective.

    Raises:
        ValueError: a unit is sharded across ranks that together do not hold all micro-batches.
        CollectiveMismatchError: the ranges of micro-batches held by a unit's ranks are not
            contiguous.
    """
    run, scratch = runs[group.rank], Scratch()
    found: list[WholeVector | ShardedVector] = [
        ShardedVector(flat, run, scratch)
        for unit in units_of(module)
        for flat in unit.flats
        if flat.trains
    ]
    whole = [one for one in module.parameters() if member_of(one) is None and one.requires_grad]
    found.extend(WholeVector(some, group, runs, scratch) for some in _divided(whole))
    return found


def _divided(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split parameters into lists of bounded size, each with one dtype and one device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for one in parameters:
        lists = kinds.setdefault((one.dtype, one.device), [[]])
        if lists[-1] and sum(other.numel() for other in lists[-1]) + one.numel() > _NUMEL:
            lists.append([])
        lists[-1].append(one)
    return [some for lists in kinds.values() for some in lists]
