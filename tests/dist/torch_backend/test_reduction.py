"""Torch's reduce operations have a name that the engine below can carry out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from echelon.dist.torch_backend.reduction import Reduction

_OPS = dist.ReduceOp


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (_OPS.SUM, "max"), (_OPS.MAX, "max"), (_OPS.BOR, "max"),
        (_OPS.PRODUCT, "min"), (_OPS.MIN, "min"), (_OPS.BAND, "min"), (_OPS.BXOR, "bxor"),
    ],
)  # fmt: skip
def test_booleans_use_no_bitwise_operation_where_another_gives_the_same(op, name):
    """NCCL has no bitwise operations; max and min of 0 and 1 are or and and."""
    assert Reduction.of(op).on(torch.empty(2, dtype=torch.bool)) == name


def test_other_dtypes_keep_their_operation():
    for op, name in ((_OPS.SUM, "sum"), (_OPS.BOR, "bor"), (_OPS.AVG, "avg")):
        assert Reduction.of(op).on(torch.empty(2, dtype=torch.int32)) == name


def test_a_factor_is_read_from_torchs_operation():
    reduction = Reduction.of(dist._make_nccl_premul_sum(0.5))
    assert (reduction.name, reduction.factor) == ("sum", 0.5)
