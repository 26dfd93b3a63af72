"""The bar that the model has to clear is computed right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gpt.text.bigram import bigram_loss, count_pairs, sparse_bigram_loss


def blocks_of(*texts: bytes) -> np.ndarray:
    return np.stack([np.frombuffer(text, np.uint8) for text in texts])


def test_pairs_are_counted_within_blocks_only():
    counts = count_pairs(blocks_of(b"aab", b"bbb"), 256).reshape(256, 256)
    assert counts.sum() == 4
    assert counts[ord("a"), ord("a")] == 1
    assert counts[ord("a"), ord("b")] == 1
    assert counts[ord("b"), ord("b")] == 2


def test_the_loss_is_the_one_worked_out_by_hand():
    """After three "ab", add-one smoothing gives "b" after "a" 4 of 259, and any other byte 1."""
    train = blocks_of(b"ab", b"ab", b"ab")
    expected = -(math.log(4 / 259) + math.log(1 / 259)) / 2
    assert bigram_loss(train, blocks_of(b"ab", b"ac")) == pytest.approx(expected, rel=1e-12)


def test_without_evidence_every_byte_is_as_likely():
    loss = bigram_loss(blocks_of(b"xy"), blocks_of(b"ab"))
    assert loss == pytest.approx(math.log(256))


def test_the_highest_byte_has_its_own_row():
    assert count_pairs(blocks_of(b"\xff\xff"), 256)[-1] == 1


def test_counting_without_a_table_comes_to_the_same(random):
    train, validation = (random.integers(0, 9, (3, 50), dtype=np.uint8) for _ in range(2))
    dense = bigram_loss(train, validation, 256)
    assert sparse_bigram_loss(train, validation, 256) == pytest.approx(dense, rel=1e-12)
    assert bigram_loss(train, validation, 5000) > dense  # more tokens could have come
