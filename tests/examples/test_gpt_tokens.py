"""Vocabularies: what they lose, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest
from gpt.text.data import load_dataset
from gpt.text.tokens import BYTES, make_vocabulary

TEXT = b"def f(x):\n    return x  # \xc3\xa4\n" * 20


def test_bytes_are_their_own_tokens():
    tokens = BYTES.encode(TEXT)
    assert tokens.dtype == np.uint8
    assert bytes(tokens) == TEXT == BYTES.decode(tokens.tolist())


def test_characters_lose_nothing_if_there_are_enough_tokens():
    num_characters = len(set(TEXT))
    vocabulary = make_vocabulary(TEXT, num_characters)
    assert (vocabulary.size, vocabulary.unit) == (num_characters, "character")
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


def test_rare_characters_share_the_last_token():
    vocabulary = make_vocabulary(b"aaaabbbccd", 3)
    assert vocabulary.encode(b"abcdz").tolist() == [0, 1, 2, 2, 2]


def test_words_lose_nothing_and_spell_what_they_do_not_know():
    vocabulary = make_vocabulary(TEXT, 260)
    assert (vocabulary.size, vocabulary.unit) == (260, "word")
    other = TEXT + b" unheard-of\x00\xff"
    tokens = vocabulary.encode(other)
    assert vocabulary.decode(tokens.tolist()) == other
    assert len(tokens) < len(other)
    assert max(tokens) >= 256


def test_more_tokens_than_words_leave_some_unused():
    vocabulary = make_vocabulary(TEXT, 50304)
    assert vocabulary.size == 50304
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


@pytest.mark.parametrize("size", [1, 65537])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"2 to 65536 tokens, not {size}"):
        make_vocabulary(TEXT, size)


def test_the_same_text_gives_the_same_tokens_everywhere():
    one, two = (load_dataset(None, limit_bytes=1 << 20, vocabulary=1000) for _ in range(2))
    assert one.vocabulary == two.vocabulary
    assert np.array_equal(one.train, two.train)
    assert one.train.dtype == np.uint16
