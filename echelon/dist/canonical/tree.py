"""Define the canonical tree: the order in which the values of numbered micro-batches are added.

    number        0   1   2   3   4   5   6
    height 1      [0  1]  [2  3]  [4  5]  6
    height 2      [0      .   3]  [4  .   6]
    height 3      [0          .           6]

The leaves are the micro-batches of one step, 0 to `total` - 1. Node (height, index) covers 2^height
numbers, starting at index * 2^height, but no number above `total` - 1, so the last node at a
height can be incomplete. The value of a node is the sum of its left and right children, or the left
child's value if the node has no right child. The order therefore depends only on `total`. Each rank
computes the sums of the largest subtrees that lie within its range of numbers: at most
2 log2(length of the range) sums. These are then added across ranks in the order of the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A node of the canonical tree, representing the sum of the micro-batches that it covers."""

    height: int
    index: int

    @property
    def start(self) -> int:
        """The number of the first micro-batch that the node covers."""
        return self.index << self.height

    @property
    def parent(self) -> Node:
        """The parent of this node."""
        return Node(self.height + 1, self.index >> 1)

    def stop(self, total: int) -> int:
        """Return one more than the last number that the node covers, given `total` leaves."""
        return min((self.index + 1) << self.height, total)


@dataclass(frozen=True, slots=True)
class Run:
    """A rank's range of consecutive numbers, `start` to `stop` - 1, which can be empty.

    Raises:
        ValueError: `start`, `stop` and `total` do not form a valid range.
    """

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        """Check that the numbers form a valid range."""
        if not 0 <= self.start <= self.stop <= self.total or self.total < 1:
            raise ValueError(f"{self}: expected 0 <= start <= stop <= total and total >= 1")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.start <= number < self.stop

    @property
    def numbers(self) -> range:
        """The numbers in the range, in ascending order."""
        return range(self.start, self.stop)

    def covers(self, node: Node) -> bool:
        """Return whether the range contains all numbers that a non-empty node covers."""
        return self.start <= node.start and node.stop(self.total) <= self.stop


def even_runs(total: int, size: int) -> tuple[Run, ...]:
    """Split `total` numbers across `size` ranks as evenly as possible; larger ranges come first.

    Raises:
        ValueError: `total` or `size` is below 1.
    """
    if total < 1 or size < 1:
        raise ValueError(f"total and size must be at least 1, got {total} and {size}")
    most, rest = divmod(total, size)
    starts = [rank * most + min(rank, rest) for rank in range(size + 1)]
    return tuple(Run(starts[rank], starts[rank + 1], total) for rank in range(size))


def root(total: int) -> Node:
    """Return the root node, which covers all `total` numbers."""
    return Node((total - 1).bit_length(), 0)


def maximal_nodes(run: Run) -> tuple[Node, ...]:
    """Return the largest nodes that together cover each number of a range exactly once.

    The nodes are in ascending order; there are at most max(1, 2 log2(len(run))) of them. If the
    range contains all numbers, the only node is the root.
    """
    nodes = []
    at = run.start
    while at < run.stop:
        node = Node(0, at)
        while node != root(run.total) and node.parent.start == at and run.covers(node.parent):
            node = node.parent
        nodes.append(node)
        at = node.stop(run.total)
    return tuple(nodes)


def combine(
    nodes: Iterable[tuple[Node, T]], run: Run, add: Callable[[T, T], T]
) -> list[tuple[Node, T]]:
    """Merge adjacent nodes into the largest nodes that fit within a range, adding their values.

    Args:
        nodes: nodes with their values, in ascending order without gaps, beginning at the range's
            start.
        run: the range in which the merged nodes must lie.
        add: a function that adds two values; its first argument is the left value.

    Returns:
        The merged nodes with their values, in ascending order. If `nodes` cover the range, the
        merged nodes are `maximal_nodes(run)`.
    """
    stack: list[tuple[Node, T]] = []
    for node, value in nodes:
        stack.append((node, value))
        _fold(stack, run, add)
    return stack


def _fold(stack: list[tuple[Node, T]], run: Run, add: Callable[[T, T], T]) -> None:
    """Merge the stack's last nodes into their parents, as long as the range covers the parent."""
    while stack:
        node, value = stack[-1]
        parent = node.parent
        if node == root(run.total) or not run.covers(parent):
            return
        if node.index & 1:
            sibling, left = stack[-2]  # complete, as this node has numbers, so it was folded
            assert sibling == Node(node.height, node.index - 1), (stack, run)
            stack[-2:] = [(parent, add(left, value))]
        elif parent.stop(run.total) == node.stop(run.total):
            stack[-1] = (parent, value)  # no right child
        else:
            return


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of all values, added in the tree's order. The first value has number 0.

    Raises:
        ValueError: there are no values.
    """
    run = Run(0, len(values), len(values))
    leaves = ((Node(0, number), value) for number, value in enumerate(values))
    ((_, total),) = combine(leaves, run, add)
    return total
