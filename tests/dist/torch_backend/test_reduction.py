"""Torch's reduce operations are read out of whatever torch passes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from echelon.dist.torch_backend.reduction import Reduction


@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"])
def test_a_bare_operation_is_read_as_torchs_options_are(op):
    enum = getattr(dist.ReduceOp, op)
    options = dist.AllreduceOptions()
    options.reduceOp = enum
    assert (
        Reduction.of(enum).name
        == Reduction.of(options).name
        == {"PRODUCT": "prod"}.get(op, op.lower())
    )


def test_a_factor_is_read_from_torchs_operation():
    reduction = Reduction.of(dist._make_nccl_premul_sum(0.5))
    assert (reduction.name, reduction.factor) == ("sum", 0.5)
