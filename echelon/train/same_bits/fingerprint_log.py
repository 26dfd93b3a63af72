"""Log hashes of a run's results for each micro-batch, for `fr-analyze --compare`.

    FOLDER/rank_1.jsonl
    {"step": 3, "number": 5, "rank": 1, "loss": "0x1.a8p+1", "gradients": {"head.bias": "9f0c..."}}
    {"step": 3, "rank": 1, "norm": "0x1.3p-1"}

Each stage of a pipeline writes its own lines, and the last stage adds the loss. Hashes are logged
per micro-batch, so runs on different numbers of ranks can be compared.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch


class FingerprintLog:
    """A log of one rank's hashes; each method writes one line before it returns.

    Args:
        folder: the folder for the log file; created if it does not exist.
        rank: this process's rank, which is part of the file's name.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._rank = rank
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder, f"rank_{rank}.jsonl")

    def micro_batch(
        self, step: int, number: int, loss: float, gradients: Mapping[str, torch.Tensor]
    ) -> None:
        """Record the loss and the gradients of one micro-batch.

        Raises:
            OSError: the line could not be written, for example because the disk is full.
        """
        prints = {name: bits(value) for name, value in gradients.items()}
        self._write({"step": step, "number": number, "loss": loss.hex(), "gradients": prints})

    def stage(
        self, step: int, number: int, stage: int, gradients: Mapping[str, torch.Tensor]
    ) -> None:
        """Record the gradients of one micro-batch in one stage of a pipeline.

        Raises:
            OSError: the line could not be written, for example because the disk is full.
        """
        prints = {name: bits(value) for name, value in gradients.items()}
        self._write({"step": step, "number": number, "stage": stage, "gradients": prints})

    def loss(self, step: int, number: int, loss: float) -> None:
        """Record the loss of one micro-batch of a pipeline.

        Raises:
            OSError: the line could not be written, for example because the disk is full.
        """
        self._write({"step": step, "number": number, "loss": loss.hex(), "gradients": {}})

    def norm(self, step: int, norm: float) -> None:
        """Record the norm of a step's reduced gradients.

        Raises:
            OSError: the line could not be written, for example because the disk is full.
        """
        self._write({"step": step, "norm": norm.hex()})

    def _write(self, line: dict[str, object]) -> None:
        with self._path.open("a") as file:
            line = {**line, "rank": self._rank, "wall_ns": time.time_ns()}
            file.write(json.dumps(line) + "\n")


def bits(value: torch.Tensor) -> str:
    """Return a hash of a tensor's bits as 16 hexadecimal digits."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
