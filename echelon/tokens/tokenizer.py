"""Create tokenizers by name: bytes, or a tokenizer from `tiktoken` or `tokenizers`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_BYTES = 256
_NAMES = "bytes, tiktoken:ENCODING (such as tiktoken:gpt2) or tokenizers:FILE (a tokenizer.json)"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A converter between text and tokens.

    Attributes:
        name: the name that was passed to `make_tokenizer`.
        vocabulary_size: the size of the vocabulary; every token is less than this number.
        end_of_document: the token that follows each document.
        encode: a function that converts text to tokens. With "bytes" and tiktoken, the name of a
            special token within the text is encoded as ordinary text.
        decode: a function that converts tokens back to text. End-of-document tokens are omitted,
            and bytes that are not valid UTF-8 are replaced.
    """

    name: str
    vocabulary_size: int
    end_of_document: int
    encode: Callable[[str], Sequence[int] | NDArray[Any]]
    decode: Callable[[Sequence[int]], str]


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with the given name.

    Args:
        name: "bytes" (UTF-8 bytes, with 256 as the end-of-document token), "tiktoken:ENCODING", or
            "tokenizers:FILE", where FILE is a `tokenizer.json`.

    Raises:
        ValueError: the name is unknown, the tokenizer's package is not installed, the tokenizer
            cannot be loaded, or the tokenizer has no end-of-document token.
    """
    kind, _, rest = name.partition(":")
    if name == "bytes":
        return Tokenizer(
            name=name,
            vocabulary_size=_NUM_BYTES + 1,
            end_of_document=_NUM_BYTES,
            encode=lambda text: np.frombuffer(text.encode(), np.uint8),
            decode=lambda tokens: bytes(t for t in tokens if t < _NUM_BYTES).decode(
                "utf-8", "replace"
            ),
        )
    if kind == "tiktoken" and rest:
        return _tiktoken(name, rest)
    if kind == "tokenizers" and rest:
        return _tokenizers(name, rest)
    raise ValueError(f"unknown tokenizer {name!r}; use one of {_NAMES}")


def _tiktoken(name: str, encoding_name: str) -> Tokenizer:
    tiktoken = _package("tiktoken")
    try:
        encoding = tiktoken.get_encoding(encoding_name)
    except Exception as error:  # fetching its tables may raise any network error
        raise ValueError(
            f"tiktoken cannot create the encoding {encoding_name!r}: {_first_line(error)}"
        ) from error
    return Tokenizer(
        name=name,
        vocabulary_size=encoding.n_vocab,
        end_of_document=encoding.eot_token,
        encode=lambda text: encoding.encode(text, disallowed_special=()),
        decode=lambda tokens: encoding.decode([t for t in tokens if t != encoding.eot_token]),
    )


def _tokenizers(name: str, path: str) -> Tokenizer:
    tokenizers = _package("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises a plain Exception
        raise ValueError(f"cannot read {path} as a tokenizer: {_first_line(error)}") from error
    ends = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
    found = [token for end in ends if (token := tokenizer.token_to_id(end)) is not None]
    if not found:
        raise ValueError(f"{path} has no end-of-document token; expected one of {', '.join(ends)}")
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    return Tokenizer(
        name=name,
        vocabulary_size=highest + 1,
        end_of_document=found[0],
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
    )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"the {name} package is not installed: run `pip install {name}`") from None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
