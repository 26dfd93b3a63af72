"""Sum a module's gradients over micro-batches, then average them over all ranks.

The backward pass of each micro-batch leaves gradients in `.grad`. They are moved out of `.grad`
immediately, so that autograd never adds the gradients of two micro-batches. Gradients are added
only in the order of the canonical tree (`dist/canonical/tree.py`), which is the same on any number
of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from echelon.dist.canonical import Run
from echelon.dist.canonical.tree import Node, combine
from echelon.dist.fsdp import reshard, unshard
from echelon.dist.fsdp.control import reshard_keeping_memory
from echelon.dist.fsdp.parameters.unit import units_of
from echelon.dist.group import ProcessGroup
from echelon.train.same_bits.vectors import Taken, vectors_of


class Gradients:
    """The gradients of a module on one rank. Creating this object is collective.

    Args:
        module: a model or one stage of a pipeline, optionally sharded.
        group: the ranks across which the micro-batches are split.
        runs: each rank's range of micro-batches.

    Attributes:
        device: the device of the gradients; None if no parameter requires gradients.

    Raises:
        ValueError: a unit is sharded across ranks that together do not hold all micro-batches.
        CollectiveMismatchError: the ranges of a unit's ranks are not contiguous.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, runs: Sequence[Run]) -> None:
        self._module = module
        self._group = group
        self._run = runs[group.rank]
        self._runs = runs
        self._vectors = vectors_of(module, group, runs)
        self._trained = [
            (name, one) for name, one in module.named_parameters() if one.requires_grad
        ]
        self._sums: list[_Sums] = []
        self.device = self._vectors[0].device if self._vectors else None

    def check_trained(self) -> None:
        """Check that no parameter has started to require gradients since this object was created.

        Raises:
            ValueError: a parameter has started to require gradients, or a parameter was added.
        """
        known = {id(one) for _, one in self._trained}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"parameter {name!r} did not require gradients when SameBits was created, "
                    "or was added later: create a new SameBits"
                )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Discard earlier gradients, and keep sharded units gathered until the context exits.

        If the context exits with an exception, the gradients collected within it are also
        discarded.
        """
        self.drop()
        self._sums = [_Sums(self._run, len(one.owners)) for one in self._vectors]
        sharded = bool(units_of(self._module))
        if sharded:
            unshard(self._module)
        try:
            yield
        except BaseException:
            self.drop()
            if sharded:
                reshard(self._module)
            raise
        if sharded:
            reshard_keeping_memory(self._module)  # the next step gathers all units again

    def drop(self) -> None:
        """Discard the gradients of the micro-batches and of the last step."""
        for vector in self._vectors:
            vector.drop()

    def take(self) -> list[Taken]:
        """Move a micro-batch's gradients out of `.grad` after a backward pass or half of one."""
        return [vector.take() for vector in self._vectors]

    def add(self, number: int, taken: list[Taken]) -> None:
        """Add one micro-batch's gradients to the sums, which reuse the gradients' memory.

        Micro-batches can be added in any order.
        """
        for sums, one in zip(self._sums, taken, strict=True):
            sums.add(number, one)

    def reduce(self, values: Sequence[float] | None = None) -> list[float]:
        """Add up the ranks' sums, and put the averages into `.grad`. Collective.

        Args:
            values: one value per micro-batch of this rank, or None on all ranks.

        Returns:
            The values of all micro-batches, in order of their numbers.

        Raises:
            CollectiveError: a rank was lost or did not join.
        """
        flags = [one for sums in self._sums for one in sums.present()]
        rows = self._gathered([*flags, *(values or ())], has_values=values is not None)
        present = [any(column) for column in zip(*(row[: len(flags)] for row in rows), strict=True)]
        while self._sums:  # each vector's memory is released before the next one is reduced
            vector = self._vectors[len(self._vectors) - len(self._sums)]
            mine, present = present[: len(vector.owners)], present[len(vector.owners) :]
            vector.give(self._sums.pop(0).nodes, mine)
        return [value for row in rows for value in row[len(flags) :]]

    def _gathered(self, mine: list[float], *, has_values: bool) -> list[list[float]]:
        """Gather each rank's list: a flag per parameter and, if requested, a value per micro-batch.

        A flag is nonzero if the rank has a gradient for the parameter. Collective.
        """
        if self._group.size == 1 or self.device is None:
            return [mine]
        block = torch.tensor(mine, dtype=torch.float64, device=self.device)
        num_flags = sum(len(vector.owners) for vector in self._vectors)
        splits = [num_flags + (len(run) if has_values else 0) for run in self._runs]
        every = block.new_empty(sum(splits))
        self._group.all_gather(every, block, output_splits=splits)
        return [row.tolist() for row in torch.split(every, splits)]

    def scale_(self, factor: float) -> None:
        """Multiply all gradients by a factor, in place."""
        for vector in self._vectors:
            found = [owner.grad for owner in vector.owners if owner.grad is not None]
            if found:
                torch._foreach_mul_(found, factor)

    def named(self, taken: list[Taken]) -> dict[str, torch.Tensor]:
        """Return one micro-batch's gradients, keyed by parameter name, in the parameters' order."""
        names = {id(one): name for name, one in self._trained}
        found = {}
        for vector, gradients in zip(self._vectors, taken, strict=True):
            for owner, gradient in zip(vector.owners, gradients, strict=True):
                if gradient is not None:
                    found[names[id(owner)]] = gradient
        return {name: found[name] for name, _ in self._trained if name in found}


class _Sums:
    """The partial sums of one vector's gradients over a range of micro-batches."""

    def __init__(self, run: Run, num_parameters: int) -> None:
        self._run = run
        self._num_parameters = num_parameters
        self._next = run.start
        self._waiting: dict[int, Taken] = {}  # schedules may compute in another order
        self.nodes: list[tuple[Node, Taken]] = []

    def add(self, number: int, taken: Taken) -> None:
        assert number in self._run, (number, self._run)
        self._waiting[number] = taken
        while self._next in self._waiting:
            leaf = (Node(0, self._next), self._waiting.pop(self._next))
            self.nodes = combine([*self.nodes, leaf], self._run, _add)
            self._next += 1

    def present(self) -> list[bool]:
        """Return one flag per parameter: True if any micro-batch gave it a gradient."""
        return [
            any(taken[index] is not None for _, taken in self.nodes)
            for index in range(self._num_parameters)
        ]


def _add(left: Taken, right: Taken) -> Taken:
    """Add `right` to `left` in place, and return the sums. A missing gradient counts as zero."""
    pairs = list(zip(left, right, strict=True))
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [_sum_of(one, other) for one, other in pairs]


def _sum_of(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is not None and right is not None:
        return left
    only = left if right is None else right
    # -0 + 0 is 0: where a rank's sums end must not decide whether zeros are added
    return None if only is None else only.add_(0.0)


def merge(one: list[Taken], other: list[Taken]) -> list[Taken]:
    """Combine the gradients from the two halves of a backward pass.

    Each half yields the gradients of some of the parameters.
    """
    return [
        [b if a is None else a for a, b in zip(first, second, strict=True)]
        for first, second in zip(one, other, strict=True)
    ]


def digest(taken: list[Taken]) -> str:
    """Return a hash of the gradients' bits, which also depends on which gradients are absent."""
    found = hashlib.sha256()
    for gradients in taken:
        for one in gradients:
            found.update(b"-" if one is None else b"+" + _bytes(one))
    return found.hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
