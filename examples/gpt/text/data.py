"""Read a rank's split of the data: its slice of each batch and of the held-out windows.

The position in the data is the number of samples that all ranks together have received from each
source (`echelon.tokens.TokenLoader`), so it can be restored with any number of ranks and any batch
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from numpy.typing import NDArray
from torch import Tensor

from echelon.tokens import Source, TokenLoader
from gpt.text.corpus import Corpus

NOT_COUNTED = -100  # as a target: cross_entropy ignores it
PIECE_TOKENS = 1 << 16  # read at once to count pairs


class Batch(NamedTuple):
    """A batch of sequences; each tensor is int64 [B, T]."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor  # of each token, numbered within its row


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """A source of this rank's slice of each batch, read ahead by threads.

    Attributes:
        rank, world_size: this rank's index among the data-parallel ranks, and their number.
        num_sequences: the number of sequences in a batch, over all ranks.
    """

    loader: TokenLoader
    rank: int
    world_size: int
    num_sequences: int

    @classmethod
    def open(
        cls,
        corpus: Corpus,
        *,
        num_sequences: int,
        context: int,
        seed: int,
        rank: int,
        world_size: int,
        mask_documents: bool = False,
        pack_documents: bool = False,
        num_workers: int = 1,
    ) -> BatchSource:
        """Start reading a corpus from its first sample."""
        loader = TokenLoader(
            corpus.train,
            context=context,
            batch=num_sequences,
            rank=rank,
            world_size=world_size,
            seed=seed,
            mask_documents=mask_documents,
            pack_documents=pack_documents,
            num_workers=num_workers,
        )
        return cls(loader=loader, rank=rank, world_size=world_size, num_sequences=num_sequences)

    @property
    def num_samples(self) -> int:
        """The number of samples that all ranks have received, which is the next one's index."""
        return self.loader.num_samples

    def next_batch(self) -> Batch:
        """Wait for the next batch; return this rank's slice of it."""
        batch = next(self.loader)
        parts = (batch.tokens, batch.targets, batch.documents)
        return Batch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, which is equal on all ranks."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: the position belongs to other data.
        """
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop the reading threads."""
        self.loader.close()


def share(num_items: int, rank: int, world_size: int) -> slice:
    """Return this rank's slice of `num_items` items; the sizes differ by at most one."""
    return slice(num_items * rank // world_size, num_items * (rank + 1) // world_size)


@dataclass(frozen=True)
class Windows:
    """Validation sequences with one extra token each: tokens and documents, int64 [N, T + 1]."""

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def num_targets(self, mask_documents: bool) -> int:
        """Return the number of targets, at least 1; with masks, first tokens are not targets."""
        firsts = self.documents[:, 1:] != self.documents[:, :-1]
        return max(1, firsts.size - (int(firsts.sum()) if mask_documents else 0))


def validation_windows(sources: Sequence[Source], *, num_windows: int, context: int) -> Windows:
    """Return evenly spaced windows of each source, in proportion to the sources' weights.

    Returns:
        The same windows in each call: about `num_windows`, and at least one per source.
    """
    total = sum(source.weight for source in sources)
    tokens, documents = [], []
    for source in sources:
        wanted = max(1, round(num_windows * source.weight / total))
        existing = len(source.shards) // (context + 1)
        chosen = np.linspace(0, existing - 1, min(wanted, existing), dtype=np.int64)
        for first in (chosen * (context + 1)).tolist():
            tokens.append(source.shards.read(first, context + 1))
            documents.append(source.shards.documents(first, context + 1))
    return Windows(np.stack(tokens), np.stack(documents))


def evaluation_batches(
    windows: Windows,
    *,
    rank: int,
    world_size: int,
    num_sequences: int,
    at_least: int,
    mask_documents: bool = False,
) -> Iterator[Batch]:
    """Yield this rank's windows in batches; every rank gets the same number of batches.

    Ranks with a sharded model must call it equally often, and a pipeline needs a sequence for each
    micro-batch. Incomplete batches are therefore padded with sequences that do not count.
    """
    mine = share(len(windows), rank, world_size)
    tokens, documents = windows.tokens[mine], windows.documents[mine]
    longest = -(-len(windows) // world_size)
    for first in range(0, longest, num_sequences):
        part = slice(first, first + num_sequences)
        yield _evaluation_batch(tokens[part], documents[part], at_least, mask_documents)


def _evaluation_batch(
    tokens: NDArray[np.int64],
    documents: NDArray[np.int64],
    at_least: int,
    mask_documents: bool,
) -> Batch:
    targets = tokens[:, 1:].copy()
    if mask_documents:
        targets[documents[:, 1:] != documents[:, :-1]] = NOT_COUNTED
    lacking = (0, 0, 0, max(0, at_least - len(tokens)))
    return Batch(
        F.pad(torch.from_numpy(tokens[:, :-1]), lacking),
        F.pad(torch.from_numpy(targets), lacking, value=NOT_COUNTED),
        F.pad(torch.from_numpy(documents[:, :-1]), lacking),
    )


def tokens_in_pieces(sources: Sequence[Source], *, at_most: int) -> Iterator[NDArray[np.int64]]:
    """Yield the first tokens of each source in pieces, in proportion to the sources' weights."""
    total = sum(source.weight for source in sources)
    for source in sources:
        end = min(len(source.shards), int(at_most * source.weight / total))
        for first in range(0, end, PIECE_TOKENS):
            yield source.shards.read(first, min(PIECE_TOKENS, end - first))
