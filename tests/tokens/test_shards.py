"""Folders of token shards: what was written is read, whatever the borders; damage is noticed."""

from __future__ import annotations

import errno
import json
import re

import numpy as np
import pytest

from echelon.errors import TokenShardsError
from echelon.tokens import ShardWriter, TokenShards
from tests.tokens.texts import counting, random_documents, write


@pytest.mark.parametrize("shard_tokens", [1, 7, 40, 1000, 10**9])
@pytest.mark.parametrize("end", [None, 1000])
def test_every_window_holds_what_was_written_whatever_the_shards(tmp_path, shard_tokens, end):
    documents = random_documents(3, 12)
    shards = write(tmp_path / "x", documents, shard_tokens=shard_tokens, end_of_document=end)
    whole = [[*d, *([] if end is None else [end])] for d in documents]
    tokens = [token for document in whole for token in document]
    numbers = np.array([n for n, document in enumerate(whole) for _ in document])
    assert len(shards) == len(tokens)
    assert shards.index.num_documents == 12
    for size in (1, 2, 13, len(tokens)):
        for first in range(len(tokens) - size + 1):
            assert shards.read(first, size).tolist() == tokens[first : first + size]
            expected = numbers[first : first + size] - numbers[first]
            assert shards.documents(first, size).tolist() == expected.tolist(), (first, size)
    shards.verify()


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65_537, "uint32")])
def test_the_smallest_dtype_that_holds_the_vocabulary_is_used(tmp_path, size, dtype):
    shards = write(tmp_path / "x", [[0, size - 1]], vocabulary_size=size)
    assert shards.index.dtype == dtype
    assert shards.read(0, 2).tolist() == [0, size - 1]


@pytest.mark.parametrize("tokens", [[-1], [60_000], [1.5], [[1, 2]]])
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path, tokens):
    with (
        pytest.raises(ValueError, match="token"),
        ShardWriter(tmp_path / "x", vocabulary_size=60_000) as writer,
    ):
        writer.add(tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_never_written_over(tmp_path):
    counting(tmp_path / "x", 10)
    with pytest.raises(ValueError, match="exists"):
        ShardWriter(tmp_path / "x", vocabulary_size=10)


def test_two_writers_of_one_folder_do_not_mix(tmp_path):
    first = ShardWriter(tmp_path / "x", vocabulary_size=10)
    second = ShardWriter(tmp_path / "x", vocabulary_size=10)
    with first:
        first.add([1])
    with pytest.raises(TokenShardsError, match="created by another process"), second:
        second.add([2])
    assert TokenShards(tmp_path / "x").read(0, 1).tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_no_token_at_all_is_an_error(tmp_path):
    with (
        pytest.raises(TokenShardsError, match="no token"),
        ShardWriter(tmp_path / "x", vocabulary_size=10) as writer,
    ):
        writer.end_document()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    def fill_the_disk() -> None:
        with ShardWriter(tmp_path / "x", vocabulary_size=10) as writer:
            writer.add([1])
            writer._open[0]._file = _FullDisk(writer._open[0]._file)
            writer.add([2])

    with pytest.raises(OSError, match="No space left"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


class _FullDisk:
    def __init__(self, file) -> None:
        self._file = file

    def write(self, data) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "index.json").unlink(), "has no index.json"),
        (lambda f: (f / "index.json").write_text("{"), "cannot read"),
        (lambda f: (f / "index.json").write_text("[]"), '"format" must be'),
        (lambda f: (f / "tokens_00000.bin").unlink(), "No such file"),
        (
            lambda f: (f / "tokens_00000.bin").write_bytes(b"12"),
            "has 2 bytes, but its index says 20",
        ),
        (lambda f: (f / "documents_00000.bin").write_bytes(b""), "has 0 bytes"),
        (lambda f: _edit(f, "version", 2), "has version 2, but this version of echelon reads 1"),
        (lambda f: _edit(f, "dtype", "float32"), "dtype must be one of"),
        (lambda f: _edit(f, "num_tokens", 11), "num_tokens is 11, but the shards have 10"),
        (lambda f: _edit(f, "vocabulary_size", -1), "must be a non-negative integer, got -1"),
        (lambda f: _edit(f, "shards", [{}]), "'tokens_name' is missing"),
        (lambda f: _edit_shard(f, "tokens_name", "../secret"), "must be the name of a file"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(tmp_path, damage, message):
    counting(tmp_path / "x", 10)
    damage(tmp_path / "x")
    with pytest.raises(TokenShardsError, match=re.escape(message)) as caught:
        TokenShards(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_flipped_bit_is_found_by_verify_and_a_foreign_token_by_reading(tmp_path):
    shards = counting(tmp_path / "x", 10, vocabulary_size=11_000)
    path = tmp_path / "x" / "tokens_00000.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 0x80
    path.write_bytes(data)
    with pytest.raises(TokenShardsError, match=r"tokens_00000\.bin: the file is damaged"):
        shards.verify()
    with pytest.raises(
        TokenShardsError, match="is outside the vocabulary of 11000 tokens: a file is damaged"
    ):
        TokenShards(tmp_path / "x").read(0, 10)


@pytest.mark.parametrize(("first", "num"), [(-1, 2), (9, 2), (0, 11), (3, -1)])
def test_reading_outside_is_refused(tmp_path, first, num):
    with pytest.raises(ValueError, match="were requested"):
        counting(tmp_path / "x", 10).read(first, num)


def _edit(folder, name, value) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def _edit_shard(folder, name, value) -> None:
    fields = json.loads((folder / "index.json").read_text())
    _edit(folder, "shards", [{**fields["shards"][0], name: value}])
