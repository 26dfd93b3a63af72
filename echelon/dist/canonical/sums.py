"""Add the vectors of one rank's micro-batches in the order of the canonical tree.

The algorithm works like a binary counter: as soon as a right child is complete, it is added to the
left child of the same parent. At most 2 (log2(n) + 1) vectors are alive at a time, where n is the
number of the rank's micro-batches.
"""

from __future__ import annotations

import torch

from echelon.dist.canonical.tree import Node, Run, combine


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype used to add values of `dtype`: at least float32.

    Raises:
        TypeError: `dtype` is not a floating-point dtype.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"{dtype}: the canonical sum needs floating-point values")
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


class TreeSums:
    """Sums over this rank's range of micro-batches, one vector per tree node not yet merged.

    Args:
        run: the micro-batch numbers of this rank.
        numel: the number of elements of each vector.
        dtype: the dtype of the sums; see `sum_dtype`.
        device: the device of the sums.

    Raises:
        TypeError: `dtype` is narrower than float32 or not floating-point.

    Example:
        >>> sums = TreeSums(Run(0, 2, 4), numel=3, dtype=torch.float32)
        >>> sums.add(0, torch.ones(3)); sums.add(1, torch.ones(3))
        >>> sums.nodes()
        [(Node(height=1, index=0), tensor([2., 2., 2.]))]
    """

    def __init__(
        self,
        run: Run,
        numel: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if sum_dtype(dtype) != dtype:
            raise TypeError(f"sums in {dtype} lose precision: use {sum_dtype(dtype)}")
        self.run = run
        self.numel = numel
        self.dtype = dtype
        self.device = torch.device(device)
        self._nodes: list[tuple[Node, torch.Tensor]] = []
        self._next = run.start

    def __repr__(self) -> str:
        return f"TreeSums({self.run}, {self._next - self.run.start} added, {self.dtype})"

    def add(self, number: int, vector: torch.Tensor) -> None:
        """Add the next micro-batch's vector.

        Args:
            number: the micro-batch's number. Each number in `run` must be added exactly once, in
                ascending order.
            vector: [numel]; the method converts it to the dtype of the sums. The caller must not
                use the vector afterwards, because its memory might be reused for a sum.

        Raises:
            ValueError: `number` is not the next number, or the vector has the wrong length or
                device.
        """
        if number != self._next or number not in self.run:
            done = self._next == self.run.stop
            reason = "the run is complete" if done else f"the next one is {self._next}"
            raise ValueError(f"micro-batch {number} of {self.run} is out of order: {reason}")
        if vector.shape != (self.numel,) or vector.device != self.device:
            raise ValueError(
                f"micro-batch {number}: the vector has shape {list(vector.shape)} on "
                f"{vector.device}, but the sums have shape [{self.numel}] on {self.device}"
            )
        self._next += 1
        leaf = (Node(0, number), vector.detach().to(self.dtype))
        self._nodes = combine([*self._nodes, leaf], self.run, _add)

    def nodes(self) -> list[tuple[Node, torch.Tensor]]:
        """Return the nodes of `maximal_nodes(run)` in ascending order, each with its sum.

        Raises:
            ValueError: not all micro-batches in `run` have been added.
        """
        if self._next != self.run.stop:
            raise ValueError(
                f"micro-batches {self._next} to {self.run.stop - 1} of {self.run} have not "
                "been added yet"
            )
        return list(self._nodes)

    def total(self) -> torch.Tensor:
        """Return the sum of all micro-batches of all ranks.

        Raises:
            ValueError: `run` contains only some of the step's micro-batches, or some of its
                micro-batches have not been added.
        """
        nodes = self.nodes()
        if len(self.run) != self.run.total:
            raise ValueError(
                f"{self.run} covers only some of the micro-batches: reduce the "
                "sums over the ranks first"
            )
        return nodes[0][1]

    @classmethod
    def joined(
        cls, run: Run, numel: int, like: TreeSums, nodes: list[tuple[Node, torch.Tensor]]
    ) -> TreeSums:
        """Create sums over `run` from the nodes of the ranks among which it is split.

        The sums in `nodes` are overwritten, because their memory is reused.

        Args:
            run: the union of these ranks' ranges.
            numel: the number of elements of each vector.
            like: the sums whose dtype and device are used.
            nodes: these ranks' nodes with their sums, in ascending order.
        """
        found = cls(run, numel, like.dtype, like.device)
        found._nodes = combine(nodes, run, _add)
        found._next = run.stop
        return found


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)
