"""Convert text into folders of token shards (`echelon prepare`)."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from echelon import __version__
from echelon.errors import TokenShardsError
from echelon.tokens.documents import Document, dataset_documents, documents_of
from echelon.tokens.tokenizer import Tokenizer, make_tokenizer
from echelon.tokens.writer import SHARD_TOKENS, ShardWriter

_SAYS_EVERY_S = 5.0
_DRAWS = 1 << 32


@dataclass(frozen=True)
class Prepared:
    """A summary of one output folder."""

    folder: Path
    num_documents: int
    num_tokens: int


def prepare(
    out: Path,
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    *,
    validation: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
) -> list[Prepared]:
    """Tokenize documents and write them into `out`, or into `out/train` and `out/validation`.

    Args:
        out: the path of the folder to create.
        documents: the documents, which are read one at a time and not held in memory.
        validation: the fraction of documents to hold out, selected by a hash of the document
            number; with 0, no documents are held out.
        shard_tokens: the number of tokens per shard.

    Raises:
        ValueError: `out` exists, `validation` is not in [0, 1), or the training or validation split
            would have no documents.
        TokenShardsError: `validation` is 0, and the documents contain no tokens.
        OSError: reading or writing failed; in that case `out` is not created.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"the held-out share must be at least 0 and below 1, got {validation}")
    if out.exists():
        raise ValueError(f"{out} already exists: remove it, or choose another folder")
    if not validation:
        return _write([out], documents, tokenizer, validation, shard_tokens)
    hidden = out.with_name(f".{out.name}-{uuid4().hex[:16]}.tmp")
    hidden.mkdir()
    try:
        folders = [hidden / "train", hidden / "validation"]
        parts = _write(folders, documents, tokenizer, validation, shard_tokens)
        hidden.rename(out)  # both parts, or none
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return [replace(part, folder=out / part.folder.name) for part in parts]


def _write(
    folders: list[Path],
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    validation: float,
    shard_tokens: int,
) -> list[Prepared]:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ShardWriter(
                    folder,
                    vocabulary_size=tokenizer.vocabulary_size,
                    tokenizer=tokenizer.name,
                    end_of_document=tokenizer.end_of_document,
                    shard_tokens=shard_tokens,
                )
            )
            for folder in folders
        ]
        _write_all(writers, documents, tokenizer, validation)
    return [
        Prepared(folder, writer.num_documents, writer.num_tokens)
        for folder, writer in zip(folders, writers, strict=True)
    ]


def _write_all(
    writers: list[ShardWriter],
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    validation: float,
) -> None:
    says_at_s = time.monotonic() + _SAYS_EVERY_S
    for number, document in enumerate(documents):
        writer = writers[-1 if _is_held_out(number, validation) else 0]
        for piece in document:
            writer.add(tokenizer.encode(piece))
            if time.monotonic() > says_at_s and sys.stderr.isatty():
                total = sum(w.num_tokens for w in writers)
                print(f"\r{total:,} tokens", end="", file=sys.stderr, flush=True)
                says_at_s = time.monotonic() + _SAYS_EVERY_S
        writer.end_document()
    empty = [writer for writer in writers if not writer.num_tokens]
    if validation and empty:
        num_documents = sum(writer.num_documents for writer in writers)
        part = "training" if empty[0] is writers[0] else "validation"
        raise ValueError(
            f"none of the {num_documents} documents went to {part}: provide more documents, or "
            "prepare the validation text in a separate folder"
        )


def _is_held_out(number: int, share: float) -> bool:
    return zlib.crc32(number.to_bytes(8, "little")) < share * _DRAWS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="echelon prepare",
        description="Tokenize text once, into memory-mapped shards for echelon.tokens.TokenLoader.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="text (one document per file) or .jsonl (one per line); .gz is unpacked",
    )
    parser.add_argument("--dataset", metavar="NAME", help="a Hugging Face data set, or its folder")
    parser.add_argument("--split", default="train", help="split of the data set")
    parser.add_argument(
        "--field",
        default="text",
        help="field that contains the text, in .jsonl lines and data sets",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, tiktoken:ENCODING (tiktoken:gpt2) or tokenizers:FILE (a tokenizer.json)",
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="hold out this share of the documents; makes OUT/train and OUT/validation",
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="tokens per shard"
    )
    parser.add_argument("--version", action="version", version=f"echelon {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 after a one-line error, or 130 if interrupted."""
    options = _parser().parse_args(argv)
    try:
        for prepared in _run(options):
            print(
                f"{prepared.folder}: {prepared.num_tokens:,} tokens from "
                f"{prepared.num_documents:,} documents, {options.tokenizer}"
            )
    except (ValueError, OSError, TokenShardsError) as error:
        print(f"echelon prepare: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"echelon prepare: interrupted; {options.out} was not created", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace) -> list[Prepared]:
    if bool(options.files) == bool(options.dataset):
        raise ValueError("pass either files or --dataset NAME")
    if options.dataset:
        documents = dataset_documents(options.dataset, split=options.split, field=options.field)
    else:
        documents = _documents_of_all(options.files, options.field)
    return prepare(
        options.out,
        documents,
        make_tokenizer(options.tokenizer),
        validation=options.validation,
        shard_tokens=options.shard_tokens,
    )


def _documents_of_all(files: list[Path], field: str) -> Iterator[Document]:
    for path in files:
        yield from documents_of(path, field=field)
