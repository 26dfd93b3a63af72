"""Vocabularies: what they lose, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest
from gpt.text.texts import standard_library, text_of
from gpt.text.vocabulary import BYTES, TokenizerVocabulary, Vocabulary
from gpt.text.vocabulary import make_vocabulary as make_vocabulary_of

from echelon.tokens.tokenizer import make_tokenizer

TEXT = b"def f(x):\n    return x  # \xc3\xa4\n" * 20


@pytest.fixture
def make_vocabulary(tmp_path):
    def make(text: bytes, size: int) -> Vocabulary:
        (tmp_path / "text").write_bytes(text)
        return make_vocabulary_of(text_of(tmp_path / "text"), size)

    return make


def test_bytes_are_their_own_tokens():
    tokens = BYTES.encode(TEXT)
    assert tokens.dtype == np.uint8
    assert bytes(tokens) == TEXT == BYTES.decode(tokens.tolist())


def test_characters_lose_nothing_if_there_are_enough_tokens(make_vocabulary):
    num_characters = len(set(TEXT))
    vocabulary = make_vocabulary(TEXT, num_characters)
    assert (vocabulary.size, vocabulary.unit) == (num_characters, "character")
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


def test_rare_characters_share_the_last_token(make_vocabulary):
    vocabulary = make_vocabulary(b"aaaabbbccd", 3)
    assert vocabulary.encode(b"abcdz").tolist() == [0, 1, 2, 2, 2]


def test_words_lose_nothing_and_spell_what_they_do_not_know(make_vocabulary):
    vocabulary = make_vocabulary(TEXT, 260)
    assert (vocabulary.size, vocabulary.unit) == (260, "word")
    other = TEXT + b" unheard-of\x00\xff"
    tokens = vocabulary.encode(other)
    assert vocabulary.decode(tokens.tolist()) == other
    assert len(tokens) < len(other)
    assert max(tokens) >= 256


def test_more_tokens_than_words_leave_some_unused(make_vocabulary):
    vocabulary = make_vocabulary(TEXT, 50304)
    assert vocabulary.size == 50304
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


@pytest.mark.parametrize("size", [1, 65537])
def test_impossible_sizes_are_refused(size, make_vocabulary):
    with pytest.raises(ValueError, match=f"2 to 65536 tokens, not {size}"):
        make_vocabulary(TEXT, size)


def test_the_same_text_gives_the_same_vocabulary_everywhere():
    text = standard_library(limit_bytes=1 << 18)
    one, two = (make_vocabulary_of(text, 1000) for _ in range(2))
    assert one == two
    assert one.encode(b"import os\n").dtype == np.uint16


def test_a_vocabulary_is_kept_in_a_file(make_vocabulary):
    vocabulary = make_vocabulary(TEXT, 260)
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


def test_a_tokenizer_is_a_vocabulary_too():
    vocabulary = TokenizerVocabulary(make_tokenizer("bytes"))
    tokens = vocabulary.encode(TEXT).tolist()
    assert (vocabulary.size, vocabulary.unit) == (257, "byte")
    assert vocabulary.decode([*tokens, 256]) == TEXT
