"""Split token shards into windows of `context` tokens, regardless of where documents end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.tokens.shards import TokenShards

NOT_COUNTED = -100  # the target that torch's cross_entropy ignores


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample: T tokens, and the target and document number of each token, all int64 [T]."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]


class Windows:
    """Consecutive samples of `context` tokens; an incomplete last sample is dropped.

    Args:
        shards: the tokens to split into samples.
        context: T, the number of tokens in a sample.
        masks: whether to exclude the first token of each document from the targets.

    Raises:
        ValueError: the shards have fewer than `context` + 1 tokens.
    """

    def __init__(self, shards: TokenShards, context: int, *, masks: bool = False) -> None:
        if len(shards) <= context:
            raise ValueError(
                f"{len(shards):,} tokens are too few: context {context} requires at least "
                f"{context + 1}"
            )
        self.shards = shards
        self.context = context
        self._masks = masks

    def __len__(self) -> int:
        return (len(self.shards) - 1) // self.context

    def read(self, number: int) -> Row:
        """Return the sample with the given number.

        Raises:
            TokenShardsError: a file is damaged or was removed.
        """
        first, num_tokens = number * self.context, self.context + 1
        tokens = self.shards.read(first, num_tokens)
        documents = self.shards.documents(first, num_tokens)
        targets = tokens[1:].copy()
        if self._masks:
            targets[documents[1:] != documents[:-1]] = NOT_COUNTED
        return Row(tokens=tokens[:-1], targets=targets, documents=documents[:-1])
