"""Define and read the index of a folder of token shards, which lists the folder's files.

    FOLDER/index.json           this index; a folder without it is not a folder of token shards
    FOLDER/tokens_00000.bin     tokens, little-endian, of the dtype stated in the index
    FOLDER/documents_00000.bin  int64, little-endian: the end of each document that ends in the
                                shard, counted in tokens from the start of the first shard

A document can continue in the next shard. A document's end is listed in the shard that contains the
document's last token. `docs/tokens.md` specifies the format for programs that write it.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.errors import TokenShardsError

NAME = "index.json"
FORMAT = "echelon-tokens"
VERSION = 1
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}  # bytes of a token
END_BYTES = 8  # of one entry in a file of documents


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard, which consists of a file of tokens and a file of document ends.

    Attributes:
        tokens_crc32: the `zlib.crc32` checksum of the file of tokens.
        documents_crc32: the `zlib.crc32` checksum of the file of document ends.
    """

    tokens_name: str
    documents_name: str
    num_tokens: int
    num_documents: int
    tokens_crc32: int
    documents_crc32: int


@dataclass(frozen=True, kw_only=True)
class Index:
    """A description of a folder of token shards.

    Attributes:
        dtype: the dtype of the stored tokens: "uint8", "uint16" or "uint32".
        vocabulary_size: the size of the vocabulary; every token is less than this number.
        tokenizer: the name of the tokenizer, as passed to `echelon prepare`.
        end_of_document: the token that follows each document; None if there is no such token.
    """

    dtype: str
    vocabulary_size: int
    tokenizer: str
    end_of_document: int | None
    shards: tuple[ShardEntry, ...]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """The number of documents in the folder."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def fingerprint(self) -> int:
        """A hash of the index, which changes if the tokens or the documents change."""
        sums = [
            (s.num_tokens, s.num_documents, s.tokens_crc32, s.documents_crc32) for s in self.shards
        ]
        return zlib.crc32(json.dumps([self.dtype, sums]).encode())

    def to_json(self) -> str:
        """Return the JSON text of the index."""
        head = {"format": FORMAT, "version": VERSION, "num_tokens": self.num_tokens}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"


def read_index(folder: Path) -> Index:
    """Read and check a folder's index, and check the sizes of the listed files.

    Raises:
        TokenShardsError: the index is missing or cannot be read, or a file that it lists is missing
            or has a different size.
    """
    path = folder / NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        index = _index_of(fields)
    except FileNotFoundError:
        raise TokenShardsError(
            f"{folder} is not a folder of token shards: it has no {NAME} "
            "(`echelon prepare` creates such a folder)",
            path=folder,
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TokenShardsError(f"cannot read {path}: {_reason(error)}", path=path) from error
    for shard in index.shards:
        _require_size(folder / shard.tokens_name, shard.num_tokens * DTYPES[index.dtype])
        _require_size(folder / shard.documents_name, shard.num_documents * END_BYTES)
    return index


def _index_of(fields: Any) -> Index:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f'the field "format" must be "{FORMAT}"')
    if fields.get("version") != VERSION:
        raise ValueError(
            f"the index has version {fields.get('version')}, but this version of echelon reads "
            f"{VERSION}"
        )
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {fields['dtype']!r}")
    index = Index(
        dtype=fields["dtype"],
        vocabulary_size=_count(fields, "vocabulary_size"),
        tokenizer=str(fields["tokenizer"]),
        end_of_document=fields["end_of_document"],
        shards=tuple(_entry_of(shard) for shard in fields["shards"]),
    )
    if fields["num_tokens"] != index.num_tokens:
        raise ValueError(
            f"num_tokens is {fields['num_tokens']}, but the shards have {index.num_tokens} tokens"
        )
    return index


def _entry_of(fields: dict[str, Any]) -> ShardEntry:
    return ShardEntry(
        tokens_name=_file_name(fields, "tokens_name"),
        documents_name=_file_name(fields, "documents_name"),
        num_tokens=_count(fields, "num_tokens"),
        num_documents=_count(fields, "num_documents"),
        tokens_crc32=_count(fields, "tokens_crc32"),
        documents_crc32=_count(fields, "documents_crc32"),
    )


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f'the field "{name}" must be a non-negative integer, got {value!r}')
    return value


def _file_name(fields: dict[str, Any], name: str) -> str:
    """Return the file name stored under `name`; reject a path that escapes the folder."""
    value = fields[name]
    if not isinstance(value, str) or Path(value).name != value:
        raise ValueError(
            f'the field "{name}" must be the name of a file in the same folder, got {value!r}'
        )
    return value


def _require_size(path: Path, num_bytes: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TokenShardsError(f"cannot read {path}: {_reason(error)}", path=path) from error
    if size != num_bytes:
        raise TokenShardsError(
            f"{path} has {size:,} bytes, but its index says {num_bytes:,}: "
            "the file was truncated or replaced",
            path=path,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
