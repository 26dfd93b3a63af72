"""Prepare a text's tokens on first use, and cache them in `$XDG_CACHE_HOME/echelon/texts`.

All ranks of a host may request them at the same time: one prepares them, and the others wait. A
text is read piece by piece, so memory use does not depend on its size. Tokens of texts that have
changed or been removed are deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from echelon.tokens import ShardWriter
from echelon.tokens.once import make_once
from gpt.text.texts import VALIDATION_EVERY, Text, is_held_out
from gpt.text.vocabulary import BYTES, Vocabulary, make_vocabulary

VERSION = 1  # version of the cached files, part of each name
SLOW_BYTES = 1 << 28  # a text that takes long enough to be announced


def cache_folder() -> Path:
    """Return the folder that contains all prepared texts."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if Path(base).is_absolute() else Path.home() / ".cache", "echelon", "texts")


def prepared(text: Text, vocabulary_size: int = BYTES.size) -> Path:
    """Return the folder with a text's vocabulary and its `train` and `validation` tokens.

    Raises:
        OSError: the text cannot be read, or its tokens cannot be written.
        ValueError: there are too few bytes to split, or no vocabulary can have that size.
    """
    if text.num_bytes < VALIDATION_EVERY:
        raise ValueError(f"the text has {text.num_bytes} bytes; splitting needs {VALIDATION_EVERY}")
    name = f"v{VERSION}-{text.stamp:08x}-{text.num_bytes}-{vocabulary_size}"
    folder = cache_folder() / name

    def make(hidden: Path) -> None:
        remove_outdated(folder.parent)
        if text.num_bytes >= SLOW_BYTES:
            print(f"preparing {text.name} in {folder}", file=sys.stderr, flush=True)
        write(text, make_vocabulary(text, vocabulary_size), hidden)

    make_once(folder, make)
    return folder


def write(text: Text, vocabulary: Vocabulary, folder: Path) -> None:
    """Write a text's training and validation tokens, its vocabulary, and a list of its files."""
    (folder / "vocabulary.json").write_text(vocabulary.to_json(), encoding="utf-8")
    files = [(str(path), *rest) for path, *rest in text.files]
    (folder / "files.json").write_text(json.dumps(files), encoding="utf-8")
    with ExitStack() as stack:
        parts = [
            stack.enter_context(
                ShardWriter(
                    folder / part,
                    vocabulary_size=vocabulary.size,
                    tokenizer=vocabulary.name,
                )
            )
            for part in ("train", "validation")
        ]
        last = parts[0]
        for block, piece, begins in text.pieces():
            part = parts[is_held_out(block)]
            if begins or part is not last:  # the next piece does not continue the one before
                last.end_document()
            part.add(vocabulary.encode(piece))
            last = part


def remove_outdated(folder: Path) -> None:
    """Delete the tokens of texts that have changed or been removed."""
    for kept in folder.glob(f"v{VERSION}-*"):
        try:
            files = json.loads((kept / "files.json").read_text(encoding="utf-8"))
            is_current = all(is_unchanged(*file) for file in files)
        except (OSError, ValueError, TypeError):
            continue  # another program's, or being deleted by another process
        if not is_current:
            shutil.rmtree(kept, ignore_errors=True)


def is_unchanged(path: str, size: int, changed_ns: int) -> bool:
    """Return whether a file has not changed since its tokens were made."""
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, changed_ns)
