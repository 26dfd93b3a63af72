"""Convert between bytes and tokens, with three kinds of vocabularies, selected by size.

    256          every byte is a token
    below 256    characters: the most frequent bytes have a token each, all others share the last
    above 256    words: the most frequent ones have a token each, the rest is encoded as bytes

A vocabulary is a function of the text and the size, so every host builds the same one. Token shards
from `echelon prepare` come with a tokenizer instead: `TokenizerVocabulary`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from echelon.tokens.tokenizer import Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from gpt.text.texts import Text

NUM_BYTES = 256
MAX_SIZE = 1 << 16  # a token is two bytes
SAMPLE_BYTES = 8 << 20  # amount of text in which words are counted, since finding them takes long
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
        """The word for a token of this vocabulary."""
        if self.size == NUM_BYTES:
            return "byte"
        return "character" if self.size < NUM_BYTES else "word"

    @property
    def name(self) -> str:
        """The tokenizer's name in token shards."""
        return f"{self.unit}s:{self.size}"

    def encode(self, text: bytes) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """Return the tokens of a text: uint8 [N], or uint16 [N] of words."""
        if self.size > NUM_BYTES:
            return np.fromiter(self._words(text), np.uint16)
        return self._table[np.frombuffer(text, np.uint8)]

    def decode(self, tokens: list[int]) -> bytes:
        """Return the text of tokens."""
        return b"".join(self.pieces[token] for token in tokens)

    def to_json(self) -> str:
        """Return the vocabulary as JSON for `from_json`."""
        return json.dumps([piece.decode("latin-1") for piece in self.pieces])

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """Parse a vocabulary from the output of `to_json`."""
        return cls(tuple(piece.encode("latin-1") for piece in json.loads(text)))

    @cached_property
    def _table(self) -> NDArray[np.uint8]:
        table = np.full(NUM_BYTES, self.size - 1, np.uint8)
        table[list(b"".join(self.pieces))] = np.arange(self.size, dtype=np.uint8)
        return table

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


@dataclass(frozen=True)
class TokenizerVocabulary:
    """The vocabulary of a tokenizer that was passed to `echelon prepare`."""

    tokenizer: Tokenizer

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.tokenizer.vocabulary_size

    @property
    def unit(self) -> str:
        """The word for a token of this vocabulary."""
        return "byte" if self.tokenizer.name == "bytes" else "token"

    def encode(self, text: bytes) -> NDArray[np.int64]:
        """Return the tokens of a text."""
        return np.asarray(self.tokenizer.encode(text.decode("utf-8", "replace")), np.int64)

    def decode(self, tokens: list[int]) -> bytes:
        """Return the text of tokens."""
        return self.tokenizer.decode(tokens).encode()


BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(NUM_BYTES)))


def vocabulary_of(folder: Path, tokenizer: str) -> Vocabulary | TokenizerVocabulary:
    """Return the vocabulary of a folder of token shards.

    Raises:
        ValueError: the tokenizer does not exist, or its package is not installed.
        OSError: the vocabulary's file cannot be read.
    """
    file = folder / "vocabulary.json"
    if file.exists():
        return Vocabulary.from_json(file.read_text(encoding="utf-8"))
    return TokenizerVocabulary(make_tokenizer(tokenizer))


def make_vocabulary(text: Text, size: int) -> Vocabulary:
    """Return the vocabulary of `size` tokens for a text.

    Raises:
        ValueError: no vocabulary can have this size.
        OSError: the text cannot be read.
    """
    if not 2 <= size <= MAX_SIZE:
        raise ValueError(f"a vocabulary has 2 to {MAX_SIZE} tokens, not {size}")
    if size == NUM_BYTES:
        return BYTES
    return characters_of(text, size) if size < NUM_BYTES else words_of(text, size)


def characters_of(text: Text, size: int) -> Vocabulary:
    """Return a vocabulary of the most frequent bytes; the last token also encodes all others."""
    counts = np.zeros(NUM_BYTES, np.int64)
    for _, piece, _ in text.pieces():
        counts += np.bincount(np.frombuffer(piece, np.uint8), minlength=NUM_BYTES)
    order = np.argsort(-counts, kind="stable")[:size]
    return Vocabulary(tuple(bytes([byte]) for byte in order))


def words_of(text: Text, size: int) -> Vocabulary:
    """Return a vocabulary of all bytes and the most frequent words of the first megabytes.

    If there are fewer words than tokens, the last tokens are unused.
    """
    counts: Counter[bytes] = Counter()
    num_bytes = 0
    for _, piece, _ in text.pieces():
        counts.update(match[0] for match in WORD.finditer(piece))
        num_bytes += len(piece)
        if num_bytes >= SAMPLE_BYTES:
            break
    known = (word for word, _ in counts.most_common() if len(word) > 1)
    words = [word for word, _ in zip(known, range(size - NUM_BYTES), strict=False)]
    unused = [b""] * (size - NUM_BYTES - len(words))
    return Vocabulary((*BYTES.pieces, *words, *unused))
