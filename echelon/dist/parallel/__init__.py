"""Distribute a model over a mesh: replicas, shards, pipeline stages and tensor-parallel slices.

Plans do not need torch, which is loaded when `parallelize` or `Parallel` is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.dist.parallel.plan import Plan

if TYPE_CHECKING:
    from echelon.dist.parallel.build import parallelize
    from echelon.dist.parallel.parallel import Parallel

__all__ = ["Parallel", "Plan", "parallelize"]

_HOMES = {"Parallel": "parallel", "parallelize": "build"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
