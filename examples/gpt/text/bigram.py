"""Compute the baseline: the loss of a bigram model, which predicts from one token only.

A transformer with broken attention can learn nothing better than bigrams, so a validation loss
clearly below the baseline shows that attention works. Counting needs no training or randomness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Iterable[NDArray[Any]]  # in pieces of consecutive tokens

MAX_DENSE = 1 << 17  # pairs of bytes are counted in a table, pairs of words by sorting


def count_pairs(blocks: Tokens, vocabulary: int) -> NDArray[np.int64]:
    """Count each pair of adjacent tokens within the pieces: [vocabulary squared]."""
    counts = np.zeros(vocabulary * vocabulary, np.int64)
    for block in blocks:  # by piece, so that the indices of a long text never exist all at once
        counts += np.bincount(pairs_of(block, vocabulary), minlength=counts.size)
    return counts


def pairs_of(block: NDArray[Any], vocabulary: int) -> NDArray[np.int64]:
    """Return the index of each pair of adjacent tokens in a piece."""
    return block[:-1].astype(np.int64) * vocabulary + block[1:]


def bigram_loss(train: Tokens, validation: Tokens, vocabulary: int = 256) -> float:
    """Return the validation loss of add-one smoothed bigrams of `train`, in nats per token."""
    if vocabulary**2 <= MAX_DENSE:
        smoothed = count_pairs(train, vocabulary).reshape(vocabulary, -1) + 1
        log_probability = np.log(smoothed / smoothed.sum(axis=1, keepdims=True)).ravel()
        seen = count_pairs(validation, vocabulary)
        return float(-(seen * log_probability).sum() / seen.sum())
    return sparse_bigram_loss(train, validation, vocabulary)


def sparse_bigram_loss(train: Tokens, validation: Tokens, vocabulary: int) -> float:
    """Do the same as `bigram_loss` if a table of all pairs would not fit into memory."""
    pairs = np.concatenate([pairs_of(block, vocabulary) for block in train])
    known, counts = np.unique(pairs, return_counts=True)
    firsts = np.bincount(pairs // vocabulary, minlength=vocabulary)
    asked = np.concatenate([pairs_of(block, vocabulary) for block in validation])
    places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    found = np.where(known[places] == asked, counts[places], 0)
    return float(-np.log((found + 1) / (firsts[asked // vocabulary] + vocabulary)).mean())
