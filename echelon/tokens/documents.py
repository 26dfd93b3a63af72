"""Read documents one by one from text files, JSON Lines files and Hugging Face data sets."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

Document = Iterator[str]  # a document's text, in pieces that fit into memory

_PIECE_CHARACTERS = 1 << 20  # a text is tokenized in pieces of about this size, cut after a line


def documents_of(path: Path, *, field: str) -> Iterator[Document]:
    """Yield a file's documents.

    Each non-blank line of a `.jsonl` or `.ndjson` file is a document; any other file is a single
    document. A `.gz` file is decompressed first.

    Args:
        path: the path of the file.
        field: the name of the JSON field that holds a document's text.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8 or is an incomplete gzip file, or a line is not a JSON
            object with a string in the field. The error message names the file and, for an invalid
            line, the line number.
    """
    is_lines = path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    with _open(path) as file:
        if is_lines:
            with _named(path):
                yield from _lines(file, path, field)
        else:
            yield _pieces(file, path)


def dataset_documents(name: str, *, split: str, field: str) -> Iterator[Document]:
    """Yield the rows of a Hugging Face data set as documents, without loading the whole data set.

    Args:
        name: the data set's name on the hub, or a local folder that `datasets` can load.
        split: the name of the split, such as "train".
        field: the name of the column that holds a document's text.

    Raises:
        ValueError: the package `datasets` is not installed, the data set cannot be loaded, or a row
            has no text in the column.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            "the datasets package is not installed: run `pip install datasets`"
        ) from None
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:  # whatever the hub or the network raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the datasets library cannot load split {split!r} of {name!r}: {reason}"
        ) from error
    for number, row in enumerate(rows):
        yield iter((_text_of(row, field, f"{name}, row {number}"),))


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert decoding and decompression errors into a `ValueError` that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _pieces(file: TextIO, path: Path) -> Document:
    with _named(path):
        while piece := file.read(_PIECE_CHARACTERS):
            yield piece + file.readline(_PIECE_CHARACTERS)


def _lines(file: TextIO, path: Path, field: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        yield iter((_text_of(row, field, f"{path}:{number}"),))


def _text_of(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        found = (
            f"its fields: {', '.join(row)}"
            if isinstance(row, dict)
            else f"expected an object, got {type(row).__name__}"
        )
        raise ValueError(f'{where} has no text in the field "{field}" ({found})')
    # JSON may hold half a surrogate pair, which no tokenizer accepts.
    return text.encode("utf-8", "replace").decode()
