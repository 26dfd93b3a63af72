"""Find the peak for utilization (MFU), as stated by the user or measured here, never guessed.

The measured peak is the rate that large matrix products reach on all ranks at the same time, in the
dtype of the training. On shared cores, or on a processor that slows down under load, it is lower
than the data sheet's figure, and closer to what training can reach.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

TERA = 1e12
CPU_SIZE, GPU_SIZE = 1024, 8192
MEASURED_S = 0.5


@dataclass(frozen=True)
class Peak:
    """The peak FLOP rate of all ranks together, and the origin of the number."""

    flops_per_s: float
    origin: str  # "stated" or "measured"


def find_peak(
    stated_tflops: float | None, world: ProcessGroup, device: torch.device, dtype: torch.dtype
) -> Peak:
    """Return the peak, as stated per rank or as measured on all ranks. Collective."""
    if stated_tflops is not None:
        return Peak(stated_tflops * TERA * world.size, "stated")
    world.barrier()  # all ranks measure at the same time, as they will train
    mine = torch.tensor([measure(device, dtype)], dtype=torch.float64, device=device)
    world.all_reduce(mine, op="sum")
    return Peak(mine.item(), "measured")


def measure(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of matrix products within half a second, in FLOP/s."""
    size = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    best_s = float("inf")
    torch.mm(left, right)
    end_s = time.perf_counter() + MEASURED_S
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * size**3 / best_s
