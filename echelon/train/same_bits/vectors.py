"""Define the vectors in which gradients are added, for whole parameters and for sharded units.

The backward of each micro-batch fills a vector, whose values are taken out at once, so that only
the canonical tree ever adds the gradients of two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from echelon.dist.canonical import Run, TreeSums, agree_runs, all_reduce, reduce_scatter, sum_dtype
from echelon.dist.fsdp.parameters.flat import Flat, mark, member_of
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.group import ProcessGroup

_NUMEL = 1 << 22  # of one vector of whole parameters: few large collectives cost least


class Vector(Protocol):
    """The gradients of several parameters in one vector.

    Attributes:
        numel, dtype, device: the size, dtype and device of the vector.
        owners: the parameters whose `.grad` the optimizer reads.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    owners: list[nn.Parameter]

    def take(self) -> tuple[torch.Tensor, list[bool]]:
        """Return one micro-batch's gradients and which parameters have one, then drop them."""

    def drop(self) -> None:
        """Drop all gradients, both of the micro-batches and of the last step."""

    def give(self, sums: TreeSums, present: Sequence[bool]) -> None:
        """Reduce the sums over the ranks, and put the averages into `.grad`. Collective."""


class WholeVector:
    """A vector of parameters that every rank holds whole.

    Args:
        parameters: parameters of the same dtype and on the same device.
        group: the ranks that share the micro-batches.
        runs: the run of micro-batches of each of those ranks.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: ProcessGroup, runs: Sequence[Run]
    ) -> None:
        self.owners = parameters
        self.numel = sum(parameter.numel() for parameter in parameters)
        self.dtype = sum_dtype(parameters[0].dtype)
        self.device = parameters[0].device
        self._group = group
        self._runs = runs

    def take(self) -> tuple[torch.Tensor, list[bool]]:
        """See `Vector`."""
        vector = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        present = [parameter.grad is not None for parameter in self.owners]
        for parameter, place in zip(self.owners, self._places(vector), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
            parameter.grad = None
        return vector, present

    def drop(self) -> None:
        """See `Vector`."""
        for parameter in self.owners:
            parameter.grad = None

    def give(self, sums: TreeSums, present: Sequence[bool]) -> None:
        """See `Vector`."""
        average = all_reduce(self._group, sums, self._runs).div_(sums.run.total)
        for parameter, place, flag in zip(self.owners, self._places(average), present, strict=True):
            parameter.grad = place.to(parameter.dtype) if flag else None

    def _places(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(vector, [parameter.numel() for parameter in self.owners])
        return [part.view(one.shape) for part, one in zip(parts, self.owners, strict=True)]


class ShardedVector:
    """A vector for a unit of `fully_shard`, kept gathered while micro-batches are computed.

    Args:
        flat: the unit's flat tensor, whose gradients the vector holds.
        run: this rank's run of micro-batches.
    """

    def __init__(self, flat: Flat, run: Run) -> None:
        self.owners = [member.shard for member in flat.members]
        self.numel = flat.layout.numel
        self.dtype = sum_dtype(flat.dtype)
        self.device = flat.device
        self.flat = flat
        self._runs = agree_runs(flat.group, run)
        self._across: tuple[Run, ...] | None = None
        if flat.replicas is not None:
            union = Run(self._runs[0].start, self._runs[-1].stop, run.total)
            self._across = agree_runs(flat.replicas, union)
        every = self._across or self._runs
        if (every[0].start, every[-1].stop) != (0, run.total):
            raise ValueError(
                f"the ranks of group {flat.group.name!r} and its replicas have micro-batches "
                f"{every[0].start} to {every[-1].stop - 1} of {run.total}: pass their whole group"
            )

    def take(self) -> tuple[torch.Tensor, list[bool]]:
        """See `Vector`."""
        vector = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        present = []
        for member in self.flat.members:
            gradient = member.leaf.grad if member.aside is None else member.aside
            present.append(gradient is not None)
            if gradient is not None:
                member.within(vector).copy_(gradient)
            member.drop_gradient()
        return vector, present

    def drop(self) -> None:
        """See `Vector`."""
        for member in self.flat.members:
            member.drop_gradient()
            member.shard.grad = None

    def give(self, sums: TreeSums, present: Sequence[bool]) -> None:
        """See `Vector`."""
        flat = self.flat
        splits = [flat.layout.chunk_numel] * flat.group.size
        mine = reduce_scatter(flat.group, sums, self._runs, splits)
        if flat.replicas is not None and self._across is not None:
            average = all_reduce(flat.replicas, mine, self._across)
        else:
            average = mine.total()
        average = average.div_(sums.run.total).to(flat.chunk.device, flat.dtype)
        for member, flag in zip(flat.members, present, strict=True):
            member.shard.grad = mark(member.of(average)) if flag else None
            if flag:
                member.call_hooks()


def vectors_of(
    module: nn.Module, group: ProcessGroup, runs: Sequence[Run]
) -> list[WholeVector | ShardedVector]:
    """Return the vectors of all trainable parameters. Collective.

    Raises:
        ValueError: a unit is sharded among ranks that together do not have all micro-batches.
        CollectiveMismatchError: the runs of a unit's ranks are not contiguous.
    """
    run = runs[group.rank]
    found: list[WholeVector | ShardedVector] = [
        ShardedVector(flat, run) for unit in units_of(module) for flat in unit.flats if flat.trains
    ]
    whole = [one for one in module.parameters() if member_of(one) is None and one.requires_grad]
    found.extend(WholeVector(some, group, runs) for some in _divided(whole))
    return found


def _divided(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into lists of one dtype and device and of bounded size."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for one in parameters:
        lists = kinds.setdefault((one.dtype, one.device), [[]])
        if lists[-1] and sum(other.numel() for other in lists[-1]) + one.numel() > _NUMEL:
            lists.append([])
        lists[-1].append(one)
    return [some for lists in kinds.values() for some in lists]
