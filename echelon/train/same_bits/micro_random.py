"""Draw random numbers that depend on the micro-batch but not on the rank that computes it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

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
    with _restored(torch.device(device)):
        torch.manual_seed(micro_batch_seed(seed, step, number))
        yield


@contextlib.contextmanager
def continued_random(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Continue another stage's sequence of random numbers, and restore the generators afterwards.

    Args:
        state: the result of `random_state` at the end of the other stage.
        device: the device on which this stage computes.
    """
    with _restored(device):
        state = state.cpu().clone()  # torch reads the state from the start of its storage
        host = torch.get_rng_state().numel()
        torch.set_rng_state(state[:host])
        if device.type != "cpu":
            _module(device).set_rng_state(state[host:].clone(), device)
        yield


def random_state(device: torch.device) -> torch.Tensor:
    """Return the host's and the device's generator states, as one uint8 tensor on `device`."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(_module(device).get_rng_state(device))
    return torch.cat(states).to(device)


def _restored(device: torch.device) -> contextlib.AbstractContextManager[None]:
    devices = [] if device.type == "cpu" else [device]
    found: contextlib.AbstractContextManager[None] = torch.random.fork_rng(
        devices, device_type="cuda" if not devices else device.type
    )
    return found


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
