"""Save the states of a rank's random number generators as an entry of a checkpoint."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch


class RandomState:
    """This rank's global random number generators (Python, NumPy, torch), as an entry of a state.

        save(path, {"model": model, "random": RandomState()})

    Each rank saves and restores its own generators. If more ranks load a checkpoint than saved it,
    each additional rank derives a reproducible state of its own from rank 0's state.

    Example:
        >>> save("runs/gpt", {"random": RandomState()})
        >>> first = torch.rand(3)
        >>> _ = load("runs/gpt", {"random": RandomState()})
        >>> torch.equal(first, torch.rand(3))
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators as plain data."""
        version, words, gauss = random.getstate()
        words_of_numpy: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
        name, keys, position, has_gauss, cached = words_of_numpy
        state: dict[str, Any] = {
            "python": [version, np.array(words, np.uint64).tobytes(), gauss],
            "numpy": [name, keys.tobytes(), int(position), int(has_gauss), float(cached)],
            "torch": _as_bytes(torch.get_rng_state()),
        }
        if torch.cuda.is_available():
            state["cuda"] = _as_bytes(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators to the states that `state_dict` returned."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(np.frombuffer(words, np.uint64).tolist()), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
        torch.set_rng_state(_as_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_as_tensor(state["cuda"]))

    def derive(self, state: dict[str, Any], rank: int) -> None:
        """Seed the generators from another rank's state and this rank's number."""
        seed = zlib.crc32(rank.to_bytes(8, "little"), zlib.crc32(state["torch"]))
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # CUDA's too


def _as_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
