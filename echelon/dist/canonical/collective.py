"""Compute sums over ranks in the order of the canonical tree, on any backend.

    reduce_scatter    an all_to_all sends every rank its block of each tree node's vector; each
                      rank adds the blocks that it received, in the tree's order.
    all_reduce        reduce_scatter, then an all_gather of the blocks.

For each of its tree nodes, a rank sends (size - 1) / size of the node's vector. With one tree node
per rank (for example, if every rank has the same number of micro-batches and this number is a power
of two), the traffic equals that of an ordinary reduce-scatter. The backends only copy values and do
not add them, so the sums do not depend on the backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from echelon.dist.canonical.scratch import Scratch
from echelon.dist.canonical.sums import TreeSums
from echelon.dist.canonical.tree import Node, Run, maximal_nodes
from echelon.dist.group import ProcessGroup
from echelon.errors import CollectiveMismatchError


def agree_runs(group: ProcessGroup, run: Run) -> tuple[Run, ...]:
    """Return every rank's range of micro-batches. Collective: blocks until all ranks have joined.

    Raises:
        CollectiveMismatchError: the ranges have different totals, or a rank's range does not begin
            where the previous rank's range ends.
        CollectiveError: a rank was lost or did not join.
    """
    rows = group.all_gather_object([run.start, run.stop, run.total])
    runs = tuple(Run(*row) for row in rows)
    for rank, (one, following) in enumerate(itertools.pairwise(runs), start=1):
        if one.total != following.total or one.stop != following.start:
            raise CollectiveMismatchError(
                f"runs of micro-batches in group {group.name!r}: rank {group.ranks[rank]} has "
                f"{following}, but the preceding rank {group.ranks[rank - 1]} has {one}. Give "
                "consecutive ranks adjacent runs of the same total: see even_runs(total, size)",
                group=group.name,
                operation="agree_runs",
                ranks=[group.ranks[rank]],
            )
    return runs


def reduce_scatter(
    group: ProcessGroup,
    sums: TreeSums,
    runs: Sequence[Run],
    splits: Sequence[int] | None = None,
    *,
    scratch: Scratch | None = None,
) -> TreeSums:
    """Add the sums of all ranks; return this rank's block of the result.

    Collective: blocks until all ranks have called this function or the group's timeout expires.

    Args:
        group: a group whose ranks have adjacent ranges, in rank order.
        sums: complete sums, whose vectors have the same length on all ranks.
        runs: the ranges of all ranks, from `agree_runs`.
        splits: the number of elements in each rank's block, in rank order; None means
            `even_splits`.
        scratch: memory for the received blocks and the returned sums; None means new memory. In a
            group of one rank, nothing is received, and the sums are returned as they are.

    Returns:
        The sums of this rank's block. Their `total()` is the final result if the ranges cover all
        micro-batches. Otherwise, these sums must still be reduced over the ranks of other groups
        that have the same block.

    Raises:
        ValueError: micro-batches are missing, or `runs` or `splits` do not match the group or the
            sums.
        CollectiveError: a rank was lost, did not join, or passed vectors of a different length.
    """
    splits = even_splits(sums.numel, group.size) if splits is None else list(splits)
    if len(splits) != group.size or sum(splits) != sums.numel or min(splits) < 0:
        raise ValueError(
            f"splits {splits}: expected {group.size} numbers that add up to {sums.numel}"
        )
    if len(runs) != group.size or runs[group.rank] != sums.run:
        raise ValueError(
            f"runs {list(runs)} do not match rank {group.rank} of {group.size}, "
            f"whose run is {sums.run}"
        )
    union = Run(runs[0].start, runs[-1].stop, sums.run.total)
    nodes = sums.nodes()
    if group.size == 1:
        return TreeSums.joined(union, sums.numel, sums, nodes)
    counts = [len(maximal_nodes(run)) for run in runs]
    block = splits[group.rank]
    received = (scratch or Scratch()).empty(sum(counts) * block, sums.dtype, sums.device)
    group.all_to_all(
        received,
        _by_destination(nodes, splits, sums),
        output_splits=[count * block for count in counts],
        input_splits=[len(nodes) * split for split in splits],
    )
    every = [node for run in runs for node in maximal_nodes(run)]
    rows = received.view(len(every), block).unbind()
    return TreeSums.joined(union, block, sums, list(zip(every, rows, strict=True)))


def all_reduce(group: ProcessGroup, sums: TreeSums, runs: Sequence[Run]) -> torch.Tensor:
    """Return the sum over all ranks' micro-batches, [numel], bitwise identical on all ranks.

    Collective: blocks until all ranks have called this function or the group's timeout expires.

    Args:
        group: a group whose ranks have adjacent ranges that jointly cover all micro-batches.
        sums: complete sums, whose vectors have the same length on all ranks.
        runs: the ranges of all ranks, from `agree_runs`.

    Raises:
        ValueError: micro-batches are missing, or the ranges do not cover all micro-batches.
        CollectiveError: a rank was lost, did not join, or passed vectors of a different length.
    """
    if runs and (runs[0].start, runs[-1].stop) != (0, sums.run.total):
        raise ValueError(f"runs {list(runs)} do not cover micro-batches 0 to {sums.run.total - 1}")
    splits = even_splits(sums.numel, group.size)
    block = reduce_scatter(group, sums, runs, splits).total()
    if group.size == 1:
        return block
    whole = torch.empty(sums.numel, dtype=sums.dtype, device=sums.device)
    group.all_gather(whole, block, output_splits=splits)
    return whole


def even_splits(numel: int, size: int) -> list[int]:
    """Split elements evenly across ranks, in multiples of 16 to suit vector instructions."""
    grains = -(-numel // 16)
    ends = [min(numel, (grains * (rank + 1) // size) * 16) for rank in range(size)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _by_destination(
    nodes: Sequence[tuple[Node, torch.Tensor]], splits: Sequence[int], sums: TreeSums
) -> torch.Tensor:
    """Return the blocks of every node, grouped by receiving rank: [len(nodes) * numel]."""
    if len(nodes) == 1:
        return nodes[0][1]
    packed = torch.empty(len(nodes) * sums.numel, dtype=sums.dtype, device=sums.device)
    at = start = 0
    for split in splits:
        for _, vector in nodes:
            packed[at : at + split].copy_(vector[start : start + split])
            at += split
        start += split
    return packed
