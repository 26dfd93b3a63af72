"""Reuse the memory for received blocks across collectives.

Large tensors get fresh pages from the system each time they are allocated. In host memory, clearing
and mapping these pages takes several times as long as writing the data.
"""

from __future__ import annotations

import torch


class Scratch:
    """Memory for the blocks that `reduce_scatter` receives.

    The memory grows to the size of the largest request. The tensors that one `reduce_scatter`
    returns are overwritten by the next `reduce_scatter` with the same `Scratch`.

    Example:
        >>> scratch = Scratch()
        >>> mine = reduce_scatter(group, sums, runs, scratch=scratch).total() / 24  # a new tensor
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of shape [numel], in memory that later calls reuse."""
        kept = self._kept.get((dtype, device))
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype, device=device)
            self._kept[dtype, device] = kept
        return kept[:numel]
