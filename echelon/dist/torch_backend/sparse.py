"""Sum sparse tensors: each rank gathers all non-zeros and adds them in rank order.

DDP uses such sums for the sparse gradients of embeddings. A sum requires three all-gathers on the
host: one for the numbers of non-zeros, one for their indices, and one for their values. The call
blocks until the sum is complete.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.torch_backend.reduction import Reduction


def all_reduce(group: ProcessGroup, tensor: Any, reduction: Reduction) -> None:
    """Sum or average a sparse COO tensor over all ranks, in place.

    Raises:
        ValueError: `reduction` is neither a sum nor an average.
    """
    if reduction.name not in ("sum", "avg") or reduction.factor is not None:
        raise ValueError(
            f"all_reduce of sparse tensors supports 'sum' and 'avg', not {reduction.name!r}"
        )
    with torch.no_grad():
        mine = tensor.detach().coalesce().to("cpu")
        parts = _gather(group, mine)
        total = parts[0]
        for part in parts[1:]:
            total = (total + part).coalesce()
        total = total / group.size if reduction.name == "avg" else total
        tensor.copy_(total.to(tensor.device))


def _gather(group: ProcessGroup, mine: Any) -> list[Any]:
    num = mine._nnz()
    nums = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(nums, torch.tensor([num]))
    longest = int(nums.max())
    places = _padded(mine.indices().t(), longest)
    values = _padded(mine.values(), longest)
    all_places = torch.empty((group.size, *places.shape), dtype=places.dtype)
    all_values = torch.empty((group.size, *values.shape), dtype=values.dtype)
    group.all_gather(all_places, places)
    group.all_gather(all_values, values)
    return [
        torch.sparse_coo_tensor(all_places[r, :n].t(), all_values[r, :n], mine.shape).coalesce()
        for r, n in enumerate(nums.tolist())
    ]


def _padded(rows: Any, length: int) -> Any:
    out = torch.zeros((length, *rows.shape[1:]), dtype=rows.dtype)
    out[: len(rows)] = rows
    return out
