"""Sums of squares have the same bits however a parameter is divided."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from echelon.dist.canonical.norm import (
    BLOCK,
    PartialBlocks,
    block_sums,
    tree_total,
    tree_totals,
)
from echelon.dist.canonical.tree import tree_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 9 * BLOCK])
def test_parts_give_the_bits_of_the_whole(numel, dtype):
    rng = random.Random(numel)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = tree_total(block_sums(values))
    assert expected.item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)
    for size in range(1, 9):
        edges = [0, *sorted(rng.choices(range(numel + 1), k=size - 1)), numel]
        bounds = list(itertools.pairwise(edges))
        partial = PartialBlocks(numel, bounds)
        every = torch.zeros(partial.message_numel, dtype=torch.float64)
        for start, stop in rng.sample(bounds, size):  # in any order
            message = torch.zeros_like(every)
            partial.write(message, values[start:stop], start)
            every += message
        assert torch.equal(tree_total(partial.read(every)), expected), bounds


def test_the_total_is_the_canonical_tree():
    for count in range(1, 40):
        sums = torch.rand(count, dtype=torch.float64)
        assert tree_total(sums).item() == tree_sum(sums.tolist(), lambda a, b: a + b)
    assert tree_total(torch.zeros(0, dtype=torch.float64)).item() == 0.0


def test_totals_of_several_have_the_bits_of_each():
    vectors = [torch.rand(count, dtype=torch.float64) for count in (5, 1, 64, 0, 65, 33, 1000, 5)]
    vectors[5][32] = float("nan")
    expected = torch.stack([tree_total(vector) for vector in vectors])
    assert torch.equal(tree_totals(vectors).view(torch.int64), expected.view(torch.int64))


def test_block_sums_are_halved_pairwise():
    values = torch.randn(300 * BLOCK + 5, generator=torch.Generator().manual_seed(4))
    padded = torch.zeros(301 * BLOCK, dtype=torch.float64)
    padded[: values.numel()] = values
    rows = padded.square().view(301, BLOCK)
    while rows.shape[1] > 1:
        rows = sum(rows.chunk(2, dim=1)[1:], rows.chunk(2, dim=1)[0])
    assert torch.equal(block_sums(values), rows.view(-1))


def test_infinity_and_nan_reach_the_norm():
    for bad in (float("inf"), float("nan")):
        values = torch.ones(3000)
        values[2999] = bad
        partial = PartialBlocks(3000, [(0, 2990), (2990, 3000)])
        every = torch.zeros(partial.message_numel, dtype=torch.float64)
        partial.write(every, values[:2990], 0)
        partial.write(every, values[2990:], 2990)
        assert not torch.isfinite(tree_total(partial.read(every)))
