"""`echelon prepare`: what it writes is the text, and each mistake is one line."""

from __future__ import annotations

import gzip
import json

import pytest

from echelon.cli import main
from echelon.tokens import TokenShards
from echelon.tokens.tokenizer import make_tokenizer


def text_of(shards: TokenShards) -> bytes:
    tokens = shards.read(0, len(shards)).tolist()
    return bytes(0 if token == 256 else token for token in tokens)


def test_files_become_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("héllo\r\nworld")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "empty.txt").write_text("")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt.gz", "empty.txt")]
    assert main(["prepare", str(tmp_path / "out"), *files]) == 0
    shards = TokenShards(tmp_path / "out")
    assert text_of(shards) == "héllo\r\nworld\0packed\0".encode()
    assert shards.index.num_documents == 2
    assert shards.index.tokenizer == "bytes"
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 21 tokens from 2 documents, bytes\n"


def test_a_text_larger_than_a_piece_is_one_document(tmp_path):
    text = "".join(f"line {n} of a long text\n" for n in range(120_000))
    (tmp_path / "long.txt").write_text(text)
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / "long.txt")]) == 0
    shards = TokenShards(tmp_path / "out")
    assert text_of(shards) == text.encode() + b"\0"
    assert shards.index.num_documents == 1


def test_lines_of_json_become_documents(tmp_path):
    rows = [{"text": "one"}, {"text": "two\n", "id": 7}, {"text": "half \ud83d pair"}]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / "x.jsonl")]) == 0
    assert text_of(TokenShards(tmp_path / "out")) == b"one\0two\n\0half ? pair\0"


def test_validation_holds_whole_documents_out(tmp_path):
    rows = "\n".join(json.dumps({"text": f"document {n:03}"}) for n in range(200))
    (tmp_path / "x.jsonl").write_text(rows)
    options = ["--validation", "0.2", "--shard-tokens", "100"]
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / "x.jsonl"), *options]) == 0
    parts = [TokenShards(tmp_path / "out" / name) for name in ("train", "validation")]
    train, held_out = (set(text_of(part).split(b"\0")[:-1]) for part in parts)
    assert not train & held_out
    assert train | held_out == {f"document {n:03}".encode() for n in range(200)}
    assert 20 <= len(held_out) <= 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("x.txt", b"\xff\xfe", [], "is not UTF-8 text"),
        ("x.txt.gz", b"plain", [], "is not a complete gzip file"),
        ("x.txt.gz", gzip.compress(b"much" * 99, mtime=0)[:-9], [], "is not a complete gzip file"),
        ("x.jsonl", b'{"text": "a"}\n{"te', [], "x.jsonl:2 is not JSON"),
        (
            "x.jsonl",
            b'{"body": "a"}',
            [],
            'x.jsonl:1 has no text in the field "text" (its fields: body)',
        ),
        (
            "x.jsonl",
            b"[1]",
            [],
            'x.jsonl:1 has no text in the field "text" (expected an object, got list)',
        ),
        ("x.txt", b"", [], "there are no tokens to write"),
        ("x.txt", b"a", ["--validation", "0.5"], "none of the 1 documents went to"),
        ("x.txt", b"a", ["--validation", "1"], "at least 0 and below 1"),
        ("x.txt", b"a", ["--shard-tokens", "0"], "shard_tokens must be at least 1"),
        ("x.txt", b"a", ["--tokenizer", "wrods"], "unknown tokenizer 'wrods'"),
        ("x.txt", b"a", ["--tokenizer", "tokenizers:missing.json"], "missing.json|not installed"),
        ("x.txt", b"a", ["--dataset", "y"], "pass either files or --dataset NAME"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_left(
    tmp_path, capsys, name, content, options, message
):
    (tmp_path / name).write_bytes(content)
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / name), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echelon prepare: error: ")
    assert any(part in line for part in message.split("|")), line
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_files_and_existing_folders_are_one_line_too(tmp_path, capsys):
    assert main(["prepare", str(tmp_path / "out"), str(tmp_path / "missing.txt")]) == 2
    assert main(["prepare", str(tmp_path / "out")]) == 2
    (tmp_path / "x.txt").write_text("x")
    assert main(["prepare", str(tmp_path), str(tmp_path / "x.txt")]) == 2
    assert main(["prepare", str(tmp_path / "no" / "out"), str(tmp_path / "x.txt")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [
        ("missing.txt" in a, "pass either files" in b, "exists" in c, "not a folder" in d)
        for a, b, c, d in [lines]
    ] == [(True,) * 4]


def test_a_tokenizer_of_the_package_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2, "</s>": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    made = make_tokenizer(f"tokenizers:{tmp_path / 'words.json'}")
    assert (made.vocabulary_size, made.end_of_document) == (4, 3)
    assert list(made.encode("a b c a")) == [0, 1, 2, 0]


def test_data_sets_of_the_package_datasets(tmp_path):
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert main(["prepare", str(tmp_path / "out"), "--dataset", str(tmp_path / "set")]) == 0
    assert text_of(TokenShards(tmp_path / "out")) == b"one\0two\0"
