"""The canonical tree: its nodes, its order, and that every division into runs gives its bits."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from echelon.dist.canonical.sums import TreeSums
from echelon.dist.canonical.tree import (
    Node,
    Run,
    combine,
    even_runs,
    maximal_nodes,
    root,
    tree_sum,
)


def _written(total):
    """The tree by its definition, as nested text: another way to the same order."""

    def node(height, index):
        start, stop = index << height, min((index + 1) << height, total)
        if height == 0:
            return str(start)
        left = node(height - 1, 2 * index)
        if start + (1 << height - 1) >= stop:
            return left
        return f"({left}+{node(height - 1, 2 * index + 1)})"

    return node((total - 1).bit_length(), 0)


def _join(left, right):
    return f"({left}+{right})"


@pytest.mark.parametrize("total", range(1, 65))
def test_the_sum_of_all_leaves_is_the_tree_as_defined(total):
    assert tree_sum([str(number) for number in range(total)], _join) == _written(total)


def test_the_order_for_seven_is_the_one_drawn_in_the_page():
    assert tree_sum(list("0123456"), _join) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("total", [*range(1, 20), 24, 31, 32, 33, 48, 63, 64])
def test_maximal_nodes_cover_each_run_exactly_and_are_few(total):
    every = list(itertools.combinations_with_replacement(range(total + 1), 2))
    chosen = every if total < 20 else random.Random(total).sample(every, 60)
    for start, stop in chosen:
        run = Run(start, stop, total)
        nodes = maximal_nodes(run)
        covered = [n for node in nodes for n in range(node.start, node.stop(total))]
        assert covered == list(run.numbers)
        assert len(nodes) <= max(1, 2 * max(1, len(run)).bit_length() - 1)
        for node in nodes:  # none can be lifted
            assert node == root(total) or not run.covers(node.parent) or node.parent.start < start
        leaves = [(Node(0, number), str(number)) for number in run.numbers]
        assert [node for node, _ in combine(leaves, run, _join)] == list(nodes)


def _divisions(total, size, rng, limit):
    """Some borders of contiguous runs, empty ones included."""
    borders = range(total + 1)
    if size == 1:
        return [()]
    return [tuple(sorted(rng.choices(borders, k=size - 1))) for _ in range(limit)]


@pytest.mark.parametrize("total", range(1, 65))
def test_every_division_among_1_to_8_ranks_gives_the_same_order(total):
    rng = random.Random(total)
    expected = _written(total)
    for size in range(1, 9):
        for borders in _divisions(total, size, rng, 3 if total < 17 else 1):
            edges = [0, *borders, total]
            nodes = []
            for start, stop in itertools.pairwise(edges):
                run = Run(start, stop, total)
                nodes += combine([(Node(0, n), str(n)) for n in run.numbers], run, _join)
            whole = combine(nodes, Run(0, total, total), _join)
            assert whole == [(root(total), expected)], (size, borders)


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 6, 7])
def test_small_totals_are_tried_with_every_division(total):
    expected = _written(total)
    for size in (3, 4):
        for borders in itertools.combinations_with_replacement(range(total + 1), size - 1):
            nodes = []
            for start, stop in itertools.pairwise([0, *borders, total]):
                run = Run(start, stop, total)
                nodes += combine([(Node(0, n), str(n)) for n in run.numbers], run, _join)
            assert combine(nodes, Run(0, total, total), _join) == [(root(total), expected)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_of_a_sum_depend_on_the_total_alone(dtype):
    rng = random.Random(5)
    for total in (1, 3, 7, 24, 37):
        generator = torch.Generator().manual_seed(total)
        leaves = [torch.randn(33, generator=generator).mul(10.0**n).to(dtype)
                  for n in (rng.uniform(-4, 4) for _ in range(total))]  # fmt: skip
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = tree_sum([leaf.to(wide) for leaf in leaves], torch.add)
        for size in (1, 2, 3, 4, 6, 8):
            nodes = []
            for run in even_runs(total, size):
                sums = TreeSums(run, 33, wide)
                for number in run.numbers:
                    sums.add(number, leaves[number].clone())
                nodes += sums.nodes()
            like = TreeSums(Run(0, total, total), 33, wide)
            found = TreeSums.joined(like.run, 33, like, nodes).total()
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (total, size)


def test_another_order_gives_other_bits_so_the_comparison_can_fail():
    leaves = list(torch.randn(24, 33, generator=torch.Generator().manual_seed(1)).unbind())
    in_rank_order = torch.zeros(33)
    for leaf in leaves:
        in_rank_order += leaf
    assert not torch.equal(in_rank_order, tree_sum(leaves, torch.add))


def test_even_runs_are_neighbors_and_differ_by_one():
    runs = even_runs(8, 3)
    assert runs == (Run(0, 3, 8), Run(3, 6, 8), Run(6, 8, 8))
    assert [len(run) for run in even_runs(2, 4)] == [1, 1, 0, 0]
    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            even_runs(*arguments)


@pytest.mark.parametrize("bounds", [(-1, 0, 1), (2, 1, 3), (0, 4, 3), (0, 0, 0)])
def test_a_run_out_of_order_is_refused(bounds):
    with pytest.raises(ValueError, match="start <= stop <= total"):
        Run(*bounds)


def test_an_accumulator_keeps_few_vectors():
    sums = TreeSums(Run(0, 64, 64), 1)
    most = 0
    for number in range(64):
        sums.add(number, torch.ones(1))
        most = max(most, len(sums._nodes))
    assert most <= 7
    assert sums.total().item() == 64


def test_an_accumulator_refuses_what_is_out_of_turn():
    sums = TreeSums(Run(2, 4, 8), 3)
    with pytest.raises(ValueError, match="next one is 2"):
        sums.add(3, torch.ones(3))
    with pytest.raises(ValueError, match="micro-batches 2 to 3"):
        sums.nodes()
    sums.add(2, torch.ones(3))
    with pytest.raises(ValueError, match=r"the vector has shape \[4\]"):
        sums.add(3, torch.ones(4))
    sums.add(3, torch.ones(3))
    with pytest.raises(ValueError, match="the run is complete"):
        sums.add(4, torch.ones(3))
    with pytest.raises(ValueError, match="covers only some"):
        sums.total()
    for dtype in (torch.bfloat16, torch.int64):
        with pytest.raises(TypeError):
            TreeSums(Run(0, 1, 1), 1, dtype)
