"""Draw random numbers that depend on the micro-batch but not on the rank that computes it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of a micro-batch, which is a 63-bit hash of the arguments."""
    text = f"{seed} {step} {number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def micro_batch_random(
    seed: int, step: int, number: int, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Seed torch's generators for one micro-batch, and restore them afterwards.

    Dropout and other random operations inside the context draw numbers that depend only on the
    arguments.

    Args:
        seed: the seed of the whole run.
        step: the number of the optimizer step.
        number: the number of the micro-batch within the step.
        device: the device on which the micro-batch is computed; the host's generator is seeded too.
    """
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        torch.manual_seed(micro_batch_seed(seed, step, number))
        yield
