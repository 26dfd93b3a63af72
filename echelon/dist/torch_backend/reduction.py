"""Translate torch's reduce operations into echelon's names."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as torch_dist

_OPS: dict[Any, str] = {
    torch_dist.ReduceOp.SUM: "sum",
    torch_dist.ReduceOp.AVG: "avg",
    torch_dist.ReduceOp.MIN: "min",
    torch_dist.ReduceOp.MAX: "max",
    torch_dist.ReduceOp.PRODUCT: "prod",
    torch_dist.ReduceOp.BAND: "band",
    torch_dist.ReduceOp.BOR: "bor",
    torch_dist.ReduceOp.BXOR: "bxor",
}
_LINEAR = ("sum", "avg")


class Reduction:
    """A reduce operation, copied from torch's options before they are freed.

    `opts.reduceOp` refers to a C++ struct that is freed when the call returns.

    Attributes:
        factor: the factor by which every rank's data is multiplied before the sum (PREMUL_SUM), or
            None.
    """

    __slots__ = ("factor", "name")

    def __init__(self, name: str, factor: Any = None) -> None:
        self.name = name
        self.factor = factor

    @classmethod
    def of(cls, options: Any) -> Reduction:
        """Return the `Reduction` for torch's options or ReduceOp; None means a sum."""
        if options is None:
            return _PLAIN[torch_dist.ReduceOp.SUM]
        kind = getattr(options, "reduceOp", options)
        factor = None
        if type(kind) is torch_dist.ReduceOp:  # torch takes its enum for an instance too
            kind, factor = cast("Any", kind).__getstate__()
        if kind == torch_dist.ReduceOp.PREMUL_SUM:
            return cls("sum", factor)
        if kind not in _PLAIN:
            raise ValueError(f"backend 'echelon' does not support reduce operation {kind}")
        return _PLAIN[kind]

    def real(self, tensor: Any) -> Any:
        """View a complex tensor as real numbers, which can be summed."""
        if not tensor.is_complex():
            return tensor
        if self.name not in _LINEAR:
            raise ValueError(f"op {self.name!r} is not defined on {tensor.dtype}")
        return torch.view_as_real(tensor)


_PLAIN = {kind: Reduction(name) for kind, name in _OPS.items()}
