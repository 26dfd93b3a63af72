"""Where text comes from, how it is split, and what a rank gets of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from gpt.text import cache
from gpt.text.corpus import load_corpus
from gpt.text.data import (
    NOT_COUNTED,
    BatchSource,
    Windows,
    evaluation_batches,
    share,
    tokens_in_pieces,
    validation_windows,
)
from gpt.text.texts import BLOCK_BYTES, VALIDATION_EVERY, standard_library

from echelon.errors import TokenShardsError
from echelon.tokens import Source, TokenShards
from echelon.tokens.prepare import prepare
from echelon.tokens.tokenizer import make_tokenizer

HELD_OUT = 255


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    def write(text: bytes, name: str = "text") -> str:
        (tmp_path / name).write_bytes(text)
        return str(tmp_path / name)

    return write


def marked_text(block_bytes: int, num_blocks: int) -> bytes:
    """Text whose held-out blocks, and only those, consist of one telling byte."""
    blocks = [
        bytes([HELD_OUT if number % VALIDATION_EVERY == VALIDATION_EVERY - 1 else 0]) * block_bytes
        for number in range(num_blocks)
    ]
    return b"".join(blocks)


def tokens_of(sources) -> np.ndarray:
    return np.concatenate(list(tokens_in_pieces(sources, at_most=1 << 40)))


def prepare_folder(folder, texts, *, validation=0.0, tokenizer="bytes"):
    prepare(
        folder, iter([iter([text]) for text in texts]), make_tokenizer(tokenizer),
        validation=validation,
    )  # fmt: skip
    return folder


def test_training_and_validation_are_disjoint_and_make_the_whole_text(write):
    corpus = load_corpus([write(marked_text(BLOCK_BYTES, 33) + b"\0rest")])
    train, held_out = tokens_of(corpus.train), tokens_of(corpus.validation)
    assert (held_out == HELD_OUT).all()
    assert HELD_OUT not in train
    assert (len(train), len(held_out)) == (31 * BLOCK_BYTES + 5, 2 * BLOCK_BYTES)


def test_tokens_are_separate_documents_where_text_was_held_out(write):
    shards = load_corpus([write(marked_text(BLOCK_BYTES, 33))]).train[0].shards
    assert shards.index.num_documents == 3
    assert shards.documents(15 * BLOCK_BYTES - 1, 2).tolist() == [0, 1]


def test_each_file_of_the_library_is_a_document(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(b"x" * 100)
    kept = cache.prepared(standard_library(tmp_path))
    assert TokenShards(kept / "train").documents(99, 2).tolist() == [0, 1]


def test_a_text_is_prepared_once_however_many_ask(write, monkeypatch):
    path = write(b"some text. " * 100)
    calls = []
    plain = cache.write

    def counted(*arguments):
        calls.append(1)
        plain(*arguments)

    monkeypatch.setattr(cache, "write", counted)
    threads = [threading.Thread(target=load_corpus, args=([path],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    load_corpus([path])
    assert len(calls) == 1


def test_a_changed_text_is_prepared_again_and_its_old_tokens_are_deleted(write):
    load_corpus([write(b"first " * 100)])
    corpus = load_corpus([write(b"later, " * 100)])
    assert bytes(tokens_of(corpus.train).astype(np.uint8)[:5]) == b"later"
    assert len(list(cache.cache_folder().glob("v*"))) == 1


def test_a_text_that_cannot_be_written_leaves_nothing(write, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = write(b"some text. " * 100)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            load_corpus([path])
    assert list(cache.cache_folder().iterdir()) == []
    assert load_corpus([path]).num_tokens == 1032


def test_folders_of_shards_are_mixed_by_their_weights(tmp_path):
    for name in "ab":
        prepare_folder(tmp_path / name, [name * 200] * 20, validation=0.3)
    corpus = load_corpus([f"{tmp_path}/a:0.7", f"{tmp_path}/b:0.3"])
    assert [(source.name, source.weight) for source in corpus.train] == [("a", 0.7), ("b", 0.3)]
    assert corpus.vocabulary.size == 257
    source = BatchSource.open(corpus, num_sequences=10, context=20, seed=0, rank=0, world_size=1)
    tokens = torch.cat([source.next_batch().tokens for _ in range(10)])
    source.close()
    from_a = (tokens == ord("a")).any(dim=1).sum().item()
    assert abs(from_a - 70) <= 1
    windows = validation_windows(corpus.validation, num_windows=10, context=20)
    assert len(windows) == 10
    assert (windows.tokens == ord("a")).any(axis=1).sum() == 7


def test_one_source_may_be_without_a_held_out_part_but_not_all(tmp_path):
    plain = prepare_folder(tmp_path / "plain", ["text " * 100])
    split = prepare_folder(tmp_path / "split", ["text " * 100] * 20, validation=0.3)
    assert len(load_corpus([str(plain), str(split)]).validation) == 1
    with pytest.raises(ValueError, match="plain has no held-out part: make it by"):
        load_corpus([str(plain)])


def test_sources_of_different_tokens_are_refused(tmp_path, write):
    folder = prepare_folder(tmp_path / "folder", ["text " * 100] * 20, validation=0.3)
    with pytest.raises(ValueError, match=r"different tokens \(bytes and bytes:256\)"):
        load_corpus([str(folder), write(b"text " * 100)])


def test_a_folder_that_is_not_one_of_shards_is_refused(tmp_path):
    with pytest.raises(TokenShardsError, match="echelon prepare"):
        load_corpus([str(tmp_path)])


def test_a_path_with_a_colon_is_a_path(write):
    path = write(b"text " * 100, "a:2")
    assert load_corpus([path]).train[0].weight == 1.0
    assert load_corpus([path + ":3"]).train[0].weight == 3.0


@pytest.mark.parametrize("text", [b"", b"too short"])
def test_a_text_too_short_to_split_is_refused(text, write):
    with pytest.raises(ValueError, match="splitting needs 16"):
        load_corpus([write(text)])


def test_a_text_too_short_for_a_window_is_refused(write):
    corpus = load_corpus([write(bytes(16 * 20))])
    corpus.require_windows_of(20)
    with pytest.raises(ValueError, match="text has 20 bytes for validation, and a window needs 21"):
        corpus.require_windows_of(21)


def test_the_standard_library_is_walked_in_order_and_without_packages(tmp_path):
    for name in ("b.py", "a.py", "a.txt", "pkg/c.py", "site-packages/x.py", "__pycache__/y.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    names = [str(path.relative_to(tmp_path)) for path, *_ in standard_library(tmp_path).files]
    assert names == ["a.py", "b.py", "pkg/c.py"]


def test_reading_stops_at_the_limit(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(name * 100)
    text = standard_library(tmp_path, limit_bytes=160)
    assert b"".join(piece for _, piece, _ in text.pieces()) == b"a" * 100 + b"b" * 60


def test_the_default_text_exists():
    corpus = load_corpus(limit_bytes=1 << 20)
    assert corpus.num_tokens + corpus.num_held_out == 1 << 20


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_ranks_shares_make_the_same_global_batch(write, random, world_size):
    corpus = load_corpus([write(random.bytes(4000))])
    common = {"num_sequences": 8, "context": 15, "seed": 3, "world_size": world_size}
    alone = BatchSource.open(corpus, rank=0, **{**common, "world_size": 1})
    ranks = [BatchSource.open(corpus, rank=rank, **common) for rank in range(world_size)]
    for _ in range(3):
        together = torch.cat([rank.next_batch().tokens for rank in ranks])
        assert torch.equal(together, alone.next_batch().tokens)
    for source in (alone, *ranks):
        source.close()


def test_shares_cover_all_items_evenly():
    slices = [share(10, rank, 4) for rank in range(4)]
    assert [item for part in slices for item in range(10)[part]] == list(range(10))
    assert {part.stop - part.start for part in slices} == {2, 3}


def numbers(tmp_path, num_tokens: int) -> list[Source]:
    """Return one source whose tokens count up."""
    text = bytes(range(num_tokens)).decode("latin-1")
    folder = prepare_folder(tmp_path / "numbers", [text[:num_tokens]])
    return [Source("numbers", TokenShards(folder))]


def test_validation_windows_are_fixed_spread_and_disjoint(tmp_path):
    sources = numbers(tmp_path, 99)  # and the end of the document
    windows = validation_windows(sources, num_windows=4, context=9)
    again = validation_windows(sources, num_windows=4, context=9)
    assert np.array_equal(windows.tokens, again.tokens)
    assert windows.tokens.shape == windows.documents.shape == (4, 10)
    assert np.unique(windows.tokens).size == windows.tokens.size
    assert windows.tokens[0, 0] == 0
    assert windows.tokens[-1, -1] == 256


def test_fewer_windows_than_asked_for_are_all_there_are(tmp_path):
    assert len(validation_windows(numbers(tmp_path, 99), num_windows=1000, context=9)) == 10


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_window_is_evaluated_once_in_equally_many_batches(world_size):
    tokens = np.arange(7 * 5).reshape(7, 5)
    windows = Windows(tokens, np.zeros_like(tokens))
    parts = [
        list(
            evaluation_batches(
                windows, rank=rank, world_size=world_size, num_sequences=2, at_least=2
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    batches = [batch for part in parts for batch in part]
    assert {len(batch.tokens) for batch in batches} == {2}
    counted = torch.cat([b.targets[(b.targets != NOT_COUNTED).all(1)] for b in batches])
    assert torch.equal(counted, torch.from_numpy(tokens[:, 1:]))


def test_masked_evaluation_leaves_first_tokens_of_documents_out():
    windows = Windows(np.arange(5)[None], np.array([[0, 0, 1, 1, 1]]))
    (batch,) = evaluation_batches(
        windows, rank=0, world_size=1, num_sequences=4, at_least=1, mask_documents=True
    )
    assert batch.targets.tolist() == [[1, NOT_COUNTED, 3, 4]]
