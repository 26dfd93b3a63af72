"""Compute the i-th item of a pseudorandom order of n items in constant time, without state.

The permutation applies a Feistel network over the next power of four repeatedly until the result is
below n ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002).
The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The
permutation is meant for ordering samples, not for cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # four rounds give a permutation that looks random; small domains need more
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(indices: NDArray[np.int64], size: int, key: tuple[int, int, int]) -> NDArray[np.int64]:
    """Return the image of each index under a pseudorandom permutation of `size` items, as int64.

    Args:
        indices: the indices to permute, each between 0 and size - 1.
        size: the number of items, at least 1 and at most 2**62.
        key: three integers that select the permutation.
    """
    assert size >= 1
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = _round_keys(key)
    result = np.asarray(indices, np.int64).astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        result[outside] = _encrypt(result[outside], half, keys)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _encrypt(
    values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    encrypted: NDArray[np.uint64] = (left << half) | right
    return encrypted


def _round_keys(key: tuple[int, int, int]) -> NDArray[np.uint64]:
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.uint64(part % (1 << 64)) + _GOLDEN)
    return _mix(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
