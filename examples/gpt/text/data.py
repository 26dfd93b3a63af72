"""Real text: where it comes from, how it is split, and which tokens are sample number k.

The text is the source of the running Python's standard library, which every machine has, or one
file of the user's. It is cut into blocks of 65,536 tokens, and every 16th block is held out for
validation. No window crosses a block's edge, so no token is both trained on and validated on.

A sample is a pure function of (seed, number). The position in the data is therefore one number, how
many samples have been trained on, and a checkpoint that holds it fits every number of ranks and
every size of batch.
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
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from gpt.text.tokens import BYTES, Vocabulary, make_vocabulary

Tokens = NDArray[np.uint8] | NDArray[np.uint16]

BLOCK_TOKENS = 64 * 1024
VALIDATION_EVERY = 16  # one block in 16 is held out
LIMIT_BYTES = 32 * 1024 * 1024  # enough text; reading more only delays the first step
WORDS_COST = 4  # finding words takes longer, and a word is several bytes
NOT_COUNTED = -100  # as a target: cross_entropy leaves it out
DRAWS_A_COUNT = 4  # Philox draws four numbers for each value of its counter
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Dataset:
    """A text, split: two arrays of whole blocks, uint8 or uint16 [num_blocks, block_tokens]."""

    train: Tokens
    validation: Tokens
    vocabulary: Vocabulary
    fingerprint: int  # CRC-32 of the text: a checkpoint belongs to one text

    def require_windows_of(self, num_tokens: int) -> None:
        """Check that a window of `num_tokens` fits into a block.

        Raises:
            ValueError: the text is too short for it.
        """
        block_tokens, unit = self.train.shape[1], self.vocabulary.unit
        if block_tokens < num_tokens:
            raise ValueError(
                f"the text is too short: {VALIDATION_EVERY} blocks of {block_tokens} {unit}s each, "
                f"and a window needs {num_tokens}"
            )


def load_dataset(
    path: Path | None, *, limit_bytes: int = LIMIT_BYTES, vocabulary: int = BYTES.size
) -> Dataset:
    """Read and split the file at `path`, or the standard library's source where it is None.

    Raises:
        OSError: the file cannot be read.
        ValueError: there are too few bytes to split, or a vocabulary of an impossible size.
    """
    files = iter([path]) if path else standard_library(Path(sysconfig.get_path("stdlib")))
    if vocabulary > BYTES.size:
        limit_bytes //= WORDS_COST
    text = read_text(files, limit_bytes)
    return split(text, make_vocabulary(text, vocabulary))


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


def split(text: bytes, vocabulary: Vocabulary = BYTES) -> Dataset:
    """Cut the text into blocks and hold out every 16th; what fills no block at the end is left.

    Raises:
        ValueError: fewer than 16 tokens.
    """
    tokens = vocabulary.encode(text)
    block_tokens = min(BLOCK_TOKENS, tokens.size // VALIDATION_EVERY)
    if block_tokens == 0:
        raise ValueError(
            f"the text has {tokens.size} {vocabulary.unit}s; splitting takes {VALIDATION_EVERY}"
        )
    num_blocks = tokens.size // block_tokens
    blocks = tokens[: num_blocks * block_tokens].reshape(num_blocks, -1)
    held_out = np.arange(num_blocks) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return Dataset(blocks[~held_out], blocks[held_out], vocabulary, zlib.crc32(text))


def share(num_items: int, rank: int, world_size: int) -> slice:
    """Return the slice of `num_items` that is this rank's; the sizes differ by at most one."""
    return slice(num_items * rank // world_size, num_items * (rank + 1) // world_size)


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """Cut this rank's share of a batch out of the training blocks."""

    blocks: Tokens
    num_sequences: int  # of the global batch
    context: int
    seed: int
    rank: int
    world_size: int

    def batch_at(self, first_sample: int) -> tuple[Tensor, Tensor]:
        """Return tokens and those that follow them: two int64 [sequences of this rank, T].

        The batch is samples number `first_sample` and after. Each draws its own numbers from a
        counter-based generator, so it is the same in whatever batch, and on whatever rank.
        """
        num_blocks, block_tokens = self.blocks.shape
        mine = share(self.num_sequences, self.rank, self.world_size)
        generator = np.random.Philox(key=self.seed, counter=first_sample + mine.start)
        drawn = generator.random_raw((mine.stop - mine.start) * DRAWS_A_COUNT)
        block, offset, *_ = drawn.reshape(-1, DRAWS_A_COUNT).T
        windows = sliding_window_view(self.blocks, self.context + 1, axis=1)
        return tokens_and_targets(
            windows[block % num_blocks, offset % (block_tokens - self.context)]
        )


def validation_windows(blocks: Tokens, *, num_windows: int, context: int) -> Tokens:
    """Pick the same evenly spread windows every time: [at most num_windows, context + 1]."""
    in_a_block = blocks.shape[1] // (context + 1)
    whole = blocks[:, : in_a_block * (context + 1)].reshape(-1, context + 1)
    chosen = np.linspace(0, len(whole) - 1, min(num_windows, len(whole)), dtype=np.int64)
    return whole[chosen]


def evaluation_batches(
    windows: Tokens, *, rank: int, world_size: int, num_sequences: int, at_least: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide windows among the ranks, in batches; every rank gets equally many.

    Ranks whose model is sharded have to call it equally often, and a pipeline needs a sequence for
    each micro-batch: what a batch lacks is made up by sequences that count for nothing.
    """
    mine = windows[share(len(windows), rank, world_size)]
    longest = -(-len(windows) // world_size)
    for first in range(0, longest, num_sequences):
        tokens, targets = tokens_and_targets(mine[first : first + num_sequences])
        lacking = (0, 0, 0, max(0, at_least - len(tokens)))
        yield F.pad(tokens, lacking), F.pad(targets, lacking, value=NOT_COUNTED)


def tokens_and_targets(windows: Tokens) -> tuple[Tensor, Tensor]:
    """Split windows [B, T + 1] into what the model sees and what it shall predict: int64 [B, T]."""
    window = torch.from_numpy(windows.astype(np.int64))
    return window[:, :-1], window[:, 1:]
