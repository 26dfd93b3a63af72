"""Open the training data: weighted sources of tokens, their held-out splits, and a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.tokens import Source, TokenShards
from gpt.text.cache import prepared
from gpt.text.texts import standard_library, text_of
from gpt.text.vocabulary import BYTES, TokenizerVocabulary, Vocabulary, vocabulary_of

INDEX = "index.json"  # of a folder of token shards


@dataclass(frozen=True)
class Corpus:
    """The training and validation tokens; no document is in both.

    Attributes:
        name: the corpus's name in messages.
    """

    name: str
    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    vocabulary: Vocabulary | TokenizerVocabulary

    @property
    def num_tokens(self) -> int:
        """The number of tokens to train on."""
        return sum(len(source.shards) for source in self.train)

    @property
    def num_held_out(self) -> int:
        """The number of tokens to validate with."""
        return sum(len(source.shards) for source in self.validation)

    @property
    def fingerprint(self) -> list[int]:
        """A list of numbers that changes if the tokens change."""
        return [source.shards.index.fingerprint for source in (*self.train, *self.validation)]

    def require_windows_of(self, num_tokens: int) -> None:
        """Check that every source and its held-out split have at least `num_tokens`.

        Raises:
            ValueError: a text is too short.
        """
        for part, sources in (("training", self.train), ("validation", self.validation)):
            for source in sources:
                if len(source.shards) < num_tokens:
                    raise ValueError(
                        f"the text is too short: {source.name} has {len(source.shards)} "
                        f"{self.vocabulary.unit}s for {part}, and a window needs {num_tokens}"
                    )


def load_corpus(
    places: Sequence[str] = (), *, vocabulary: int | None = None, limit_bytes: int | None = None
) -> Corpus:
    """Open the sources; prepare text sources on first use.

    Args:
        places: folders of token shards or text files, each optionally followed by `:WEIGHT`; if
            empty, the source of the standard library.
        vocabulary: the size of a text's vocabulary, 256 by default. Token shards have their own.
        limit_bytes: the maximum number of bytes to read from the standard library.

    Raises:
        ValueError: a text is too short to split, sources have different tokenizers, no folder has
            a held-out split, or a weight is not a number.
        TokenShardsError: a folder does not contain token shards, or is damaged.
        OSError: a file cannot be read.
    """
    size = vocabulary or BYTES.size
    if not places:
        folder = prepared(standard_library(limit_bytes=limit_bytes), size)
        return _join("the standard library", [_open(folder, "library", 1.0)])
    split = [_split(place) for place in places]
    names = _names([path for path, _ in split])
    opened = []
    for (path, weight), source in zip(split, names, strict=True):
        folder = path if path.is_dir() else prepared(text_of(path), size)
        opened.append(_open(folder, source, weight))
    return _join(", ".join(map(str, places)), opened)


@dataclass(frozen=True)
class _Opened:
    train: Source
    validation: Source | None
    tokenizer: str
    folder: Path


def _split(place: str) -> tuple[Path, float]:
    """Split PATH:WEIGHT; if the whole argument is an existing path, its weight is 1."""
    path, colon, weight = place.rpartition(":")
    if not colon or Path(place).exists():
        return Path(place), 1.0
    try:
        return Path(path), float(weight)
    except ValueError:
        return Path(place), 1.0


def _names(paths: list[Path]) -> list[str]:
    """Name sources by their last path components, so that a checkpoint finds them after a move."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _open(folder: Path, name: str, weight: float) -> _Opened:
    has_parts = not (folder / INDEX).exists() and (folder / "train").is_dir()
    shards = TokenShards(folder / "train" if has_parts else folder)
    held_out = folder / "validation"
    validation = Source(name, TokenShards(held_out), weight) if has_parts else None
    return _Opened(Source(name, shards, weight), validation, shards.index.tokenizer, folder)


def _join(name: str, opened: list[_Opened]) -> Corpus:
    first = opened[0]
    vocabulary = vocabulary_of(first.folder, first.tokenizer)
    for other in opened[1:]:
        if other.tokenizer != first.tokenizer or (
            isinstance(vocabulary, Vocabulary)
            and vocabulary_of(other.folder, other.tokenizer) != vocabulary
        ):
            raise ValueError(
                f"{first.train.name} and {other.train.name} have different tokens "
                f"({first.tokenizer} and {other.tokenizer}): prepare both with one tokenizer"
            )
    validation = [one.validation for one in opened if one.validation and one.validation.weight]
    if not validation:
        raise ValueError(
            f"{first.train.name} has no held-out part: make it by "
            "`echelon prepare --validation 0.01`"
        )
    return Corpus(name, tuple(one.train for one in opened), tuple(validation), vocabulary)
