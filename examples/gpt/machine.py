"""What a rank takes of the machine: one thread, and one GPU where its group can use it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup


def limit_threads() -> None:
    """Compute with one thread a rank, as ranks share the cores; OMP_NUM_THREADS overrides that."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def load_optimizers() -> None:
    """Have torch load what it loads only when the first optimizer is made, which takes seconds.

    Before `dist.init` that counts as starting; after it, as ranks that have gone silent.
    """
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def choose_device(world: ProcessGroup) -> torch.device:
    """Return this rank's own GPU if the world's backend reduces there, else the CPU."""
    if torch.cuda.is_available() and "nccl" in world.backend:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
