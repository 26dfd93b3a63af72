"""From bytes to tokens and back: three vocabularies, told apart by their size.

    256          every byte is a token
    below 256    characters: the most frequent bytes have a token each, all others share the last
    above 256    words: the most frequent ones have a token each, the rest is spelt in bytes

A vocabulary is a function of the text and the size, so every rank makes the same one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NUM_BYTES = 256
MAX_SIZE = 1 << 16  # a token is two bytes
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]+|[ \t]+|\n+|[^A-Za-z0-9\s]+|\s")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes that each token stands for."""

    pieces: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.pieces)

    @property
    def unit(self) -> str:
        """What a token is called."""
        if self.size == NUM_BYTES:
            return "byte"
        return "character" if self.size < NUM_BYTES else "word"

    def encode(self, text: bytes) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """Return the tokens of a text: uint8 [N], or uint16 [N] of words."""
        if self.size > NUM_BYTES:
            return np.fromiter(self._words(text), np.uint16)
        table = np.full(NUM_BYTES, self.size - 1, np.uint8)
        table[list(b"".join(self.pieces))] = np.arange(self.size, dtype=np.uint8)
        return table[np.frombuffer(text, np.uint8)]

    def decode(self, tokens: list[int]) -> bytes:
        """Return the text of tokens."""
        return b"".join(self.pieces[token] for token in tokens)

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    def _words(self, text: bytes):  # noqa: ANN202 -- a generator of int
        for match in WORD.finditer(text):
            number = self._numbers.get(match[0])
            if number is not None:
                yield number
            else:
                yield from match[0]


BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(NUM_BYTES)))


def make_vocabulary(text: bytes, size: int) -> Vocabulary:
    """Return the vocabulary of `size` tokens for a text.

    Raises:
        ValueError: a size that no vocabulary can have.
    """
    if not 2 <= size <= MAX_SIZE:
        raise ValueError(f"a vocabulary has 2 to {MAX_SIZE} tokens, not {size}")
    if size == NUM_BYTES:
        return BYTES
    return characters_of(text, size) if size < NUM_BYTES else words_of(text, size)


def characters_of(text: bytes, size: int) -> Vocabulary:
    """Give the most frequent bytes a token each; the last token is for every other byte."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=NUM_BYTES)
    order = np.argsort(-counts, kind="stable")[:size]
    return Vocabulary(tuple(bytes([byte]) for byte in order))


def words_of(text: bytes, size: int) -> Vocabulary:
    """Give each byte a token, and the most frequent longer words one each.

    Where the text has fewer words than there are tokens, the last tokens stand for nothing.
    """
    counts = Counter(match[0] for match in WORD.finditer(text))
    known = (word for word, _ in counts.most_common() if len(word) > 1)
    words = [word for word, _ in zip(known, range(size - NUM_BYTES), strict=False)]
    unused = [b""] * (size - NUM_BYTES - len(words))
    return Vocabulary((*BYTES.pieces, *words, *unused))
