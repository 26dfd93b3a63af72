"""Real text as bytes: where it comes from, how it is split, and which bytes make batch number k.

The text is the source of the running Python's standard library, which every machine has, or one
file of the user's. It is cut into blocks of 64 KiB, and every 16th block is held out for
validation. No window crosses a block's edge, so no byte is both trained on and validated on.

A batch is a pure function of (seed, step): no iterator has a position that a checkpoint would have
to remember, and the global batch is the same for every number of ranks.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

BLOCK_BYTES = 64 * 1024
VALIDATION_EVERY = 16  # one block in 16 is held out
LIMIT_BYTES = 32 * 1024 * 1024  # enough text; reading more only delays the first step
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Dataset:
    """A text, split: two arrays of whole blocks, uint8 [num_blocks, block_bytes]."""

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    fingerprint: int  # CRC-32 of the text: a checkpoint belongs to one text

    def require_windows_of(self, num_bytes: int) -> None:
        """Check that a window of `num_bytes` fits into a block.

        Raises:
            ValueError: the text is too short for it.
        """
        block_bytes = self.train.shape[1]
        if block_bytes < num_bytes:
            raise ValueError(
                f"the text is too short: {VALIDATION_EVERY} blocks of {block_bytes} bytes each, "
                f"and a window needs {num_bytes}"
            )


def load_dataset(path: Path | None, *, limit_bytes: int = LIMIT_BYTES) -> Dataset:
    """Read and split the file at `path`, or the standard library's source where it is None.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are too few bytes to split.
    """
    files = iter([path]) if path else standard_library(Path(sysconfig.get_path("stdlib")))
    return split(read_text(files, limit_bytes))


def standard_library(folder: Path) -> Iterator[Path]:
    """Walk the library's own modules in a fixed order, lazily: a small limit reads few folders."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - NOT_THE_LIBRARY)
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def read_text(files: Iterator[Path], limit_bytes: int) -> bytes:
    """Join the files' bytes until there are `limit_bytes` of them."""
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(limit_bytes - len(text))
        if len(text) == limit_bytes:
            break
    return bytes(text)


def split(text: bytes) -> Dataset:
    """Cut the text into blocks and hold out every 16th; what fills no block at the end is left.

    Raises:
        ValueError: fewer than 16 bytes.
    """
    block_bytes = min(BLOCK_BYTES, len(text) // VALIDATION_EVERY)
    if block_bytes == 0:
        raise ValueError(f"the text has {len(text)} bytes; splitting takes {VALIDATION_EVERY}")
    num_blocks = len(text) // block_bytes
    blocks = np.frombuffer(text, np.uint8, num_blocks * block_bytes).reshape(num_blocks, -1)
    held_out = np.arange(num_blocks) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return Dataset(blocks[~held_out], blocks[held_out], zlib.crc32(text))


def share(num_items: int, rank: int, world_size: int) -> slice:
    """Return the slice of `num_items` that is this rank's; the sizes differ by at most one."""
    return slice(num_items * rank // world_size, num_items * (rank + 1) // world_size)


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Cut this rank's share of batch number k out of the training blocks."""

    blocks: NDArray[np.uint8]
    num_sequences: int  # of the global batch
    context: int
    seed: int
    rank: int
    world_size: int

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the bytes that follow them: two int64 [sequences of this rank, T]."""
        num_blocks, block_bytes = self.blocks.shape
        random = np.random.default_rng((self.seed, step))
        block = random.integers(0, num_blocks, self.num_sequences)
        offset = random.integers(0, block_bytes - self.context, self.num_sequences)
        mine = share(self.num_sequences, self.rank, self.world_size)
        windows = sliding_window_view(self.blocks, self.context + 1, axis=1)
        return tokens_and_targets(windows[block[mine], offset[mine]])


def validation_windows(
    blocks: NDArray[np.uint8], *, num_windows: int, context: int
) -> NDArray[np.uint8]:
    """Pick the same evenly spread windows every time: uint8 [at most num_windows, context + 1]."""
    in_a_block = blocks.shape[1] // (context + 1)
    whole = blocks[:, : in_a_block * (context + 1)].reshape(-1, context + 1)
    chosen = np.linspace(0, len(whole) - 1, min(num_windows, len(whole)), dtype=np.int64)
    return whole[chosen]


def tokens_and_targets(windows: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """Split windows [B, T + 1] into what the model sees and what it shall predict: int64 [B, T]."""
    window = torch.from_numpy(windows.astype(np.int64))
    return window[:, :-1], window[:, 1:]
