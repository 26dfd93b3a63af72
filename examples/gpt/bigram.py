"""The bar to clear: the loss of the best model that looks at one byte only.

A transformer whose attention is broken can learn bigrams and nothing better, so a validation loss
clearly below this one shows that attention works. Counting is exact: no training, no randomness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_BYTES = 256


def count_pairs(blocks: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Count how often each byte follows each other one within a block: [256, 256]."""
    counts = np.zeros(NUM_BYTES * NUM_BYTES, np.int64)
    for block in blocks:  # by block, so that the indices of 32 MB of text never exist at once
        pairs = block[:-1].astype(np.uint16) * NUM_BYTES + block[1:]
        counts += np.bincount(pairs, minlength=counts.size)
    return counts.reshape(NUM_BYTES, NUM_BYTES)


def bigram_loss(train: NDArray[np.uint8], validation: NDArray[np.uint8]) -> float:
    """Return the validation loss, in nats a byte, of add-one-smoothed pairs counted in `train`."""
    smoothed = count_pairs(train) + 1
    log_probability = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))
    seen = count_pairs(validation)
    return float(-(seen * log_probability).sum() / seen.sum())
