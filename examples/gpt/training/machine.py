"""Select a rank's resources: one thread, and the GPU of its local rank, if any."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def limit_threads() -> None:
    """Compute with one thread, as ranks share the cores. OMP_NUM_THREADS overrides this."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def load_optimizers() -> None:
    """Load the modules that torch would load for the first optimizer, which takes seconds.

    Before `dist.init`, this counts as startup; afterwards, the ranks would seem to have stalled.
    """
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def choose_device(wanted: str = "auto") -> torch.device:
    """Return this rank's device, and make it torch's current device.

    Call this before `dist.init`, because a library such as NCCL binds to the current device. If
    there are more local ranks than GPUs, ranks share GPUs.

    Args:
        wanted: "cpu", "cuda", or "auto": a GPU if torch finds one.

    Warns if the machine has a GPU that torch cannot use.

    Raises:
        ValueError: "cuda" is given, and torch finds no GPU.
    """
    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ValueError("--device cuda: torch finds no GPU")
    if not has_gpu:
        if wanted == "auto" and DRIVER.exists() and local_rank() == 0:
            warnings.warn(
                f"this machine has a GPU driver, but torch {torch.__version__} finds no GPU: "
                "training on the CPU",
                RuntimeWarning,
                stacklevel=1,  # a single place, so that Python shows it once
            )
        return torch.device("cpu")
    device = torch.device("cuda", local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32: float32 products on the tensor cores
    return device


def local_rank() -> int:
    """Return this rank's local rank, its index on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def describe(device: torch.device) -> str:
    """Describe a device; for a GPU, with its name and the number of local ranks per GPU."""
    if device.type != "cuda":
        return str(device)
    num_ranks, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    used = min(num_ranks, num_gpus)
    shared = f", {num_ranks} local ranks on {used} GPUs" if num_ranks > 1 else ""
    return f"{device} ({torch.cuda.get_device_name(device)}{shared})"


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a host tensor to a device; the copy to a GPU is asynchronous."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
