"""What a rank takes of the machine: one thread, and the GPU of its local rank, if any."""

from __future__ import annotations

import os

import torch


def limit_threads() -> None:
    """Compute with one thread a rank, as ranks share the cores; OMP_NUM_THREADS overrides that."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def load_optimizers() -> None:
    """Have torch load what it loads only when the first optimizer is made, which takes seconds.

    Before `dist.init` that counts as starting; after it, as ranks that have gone silent.
    """
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def choose_device(wanted: str = "auto") -> torch.device:
    """Return where this rank computes, and make it torch's current device.

    Call it before `dist.init`: a library such as NCCL binds to the current device. Local ranks
    beyond the number of GPUs share them.

    Args:
        wanted: "cpu", "cuda", or "auto": a GPU where torch finds one.

    Raises:
        ValueError: "cuda", and torch finds no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch finds no GPU")
    if wanted == "cpu" or not has_gpu:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
