"""Reduce the ranks' arrays in rank order, in C if the extension was built, otherwise with NumPy."""

from __future__ import annotations

from echelon.dist.arithmetic.reduce_numpy import reduce_into
from echelon.dist.backends.shm import native
from echelon.dist.operation.arrays import DTYPES, Flat
from echelon.dist.operation.operation import REDUCE_OPS

_DTYPES = {dtype: number for number, dtype in enumerate(DTYPES)}
_REDUCE_OPS = {op: number for number, op in enumerate(REDUCE_OPS)}


def reduce(target: Flat, parts: list[Flat], reduce_op: str, dtype: str) -> None:
    """Reduce `parts` in rank order into `target`."""
    core = native.core()
    if core is None:
        reduce_into(target, parts, reduce_op, dtype)
    else:
        core.reduce(target, parts, _DTYPES[dtype], _REDUCE_OPS[reduce_op])
