"""Sum over numbered micro-batches, with bitwise identical results on any number of ranks."""

from echelon.dist.canonical.collective import agree_runs, all_reduce, reduce_scatter
from echelon.dist.canonical.scratch import Scratch
from echelon.dist.canonical.sums import TreeSums, sum_dtype
from echelon.dist.canonical.tree import Node, Run, even_runs, maximal_nodes, tree_sum

__all__ = [
    "Run",
    "Node",
    "even_runs",
    "maximal_nodes",
    "tree_sum",
    "TreeSums",
    "Scratch",
    "sum_dtype",
    "agree_runs",
    "reduce_scatter",
    "all_reduce",
]
