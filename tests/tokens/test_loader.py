"""Batches: every window once per epoch, on any number of ranks, from any position."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

from echelon.errors import TokenShardsError
from echelon.tokens import Source, TokenLoader, TokenShards
from tests.tokens.texts import counting, write


@pytest.fixture
def counted(tmp_path):
    """1000 tokens that are their own positions: 99 windows of 10."""
    return Source("counted", counting(tmp_path / "counted", 1000, shard_tokens=64))


@pytest.fixture
def loader_of():
    made = []

    def make(sources, **settings) -> TokenLoader:
        loader = TokenLoader(sources, **{"context": 10, "batch": 6, "seed": 3, **settings})
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()


def rows_of(batches) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


def test_an_epoch_has_each_window_once_and_the_next_has_another_order(counted, loader_of):
    rows = rows_of(islice(loader_of([counted], batch=9), 22))
    first, second = rows[:99], rows[99:198]
    windows = [tuple(range(start, start + 10)) for start in range(0, 990, 10)]
    assert sorted(first) == windows
    assert sorted(second) == windows
    assert first != second
    assert first != windows


def test_targets_are_the_tokens_that_follow(counted, loader_of):
    batch = next(loader_of([counted]))
    assert batch.tokens.shape == batch.targets.shape == (6, 10)
    assert (batch.targets == batch.tokens + 1).all()
    assert batch.tokens.dtype == batch.targets.dtype == np.int64


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_divide_the_batches_of_one_process(counted, loader_of, world_size):
    whole = loader_of([counted])
    parts = [loader_of([counted], rank=r, world_size=world_size) for r in range(world_size)]
    for batch in islice(whole, 40):
        mine = [next(part) for part in parts]
        assert rows_of([batch]) == rows_of(mine)
        firsts = [part.first_sample for part in mine]
        sizes = [len(part.tokens) for part in mine]
        assert firsts == (batch.first_sample + np.cumsum([0, *sizes[:-1]])).tolist()
    assert len({str(part.state_dict()) for part in (whole, *parts)}) == 1


@pytest.mark.parametrize("stop", [0, 1, 7, 16, 17, 33])
def test_the_stream_continues_at_the_next_sample_on_another_number_of_ranks(
    tmp_path, counted, loader_of, stop
):
    other = Source("other", counting(tmp_path / "other", 333), weight=0.4)
    undisturbed = rows_of(islice(loader_of([counted, other]), 50))
    before = [loader_of([counted, other], rank=r, world_size=4) for r in range(4)]
    rows = [row for _ in range(stop) for row in rows_of(next(loader) for loader in before)]
    state = before[2].state_dict()
    after = [loader_of([counted, other], rank=r, world_size=3, prefetch=5) for r in range(3)]
    for loader in after:
        next(loader)  # what was read ahead is dropped
        loader.load_state_dict(state)
    rows += [row for _ in range(50 - stop) for row in rows_of(next(loader) for loader in after)]
    assert rows == undisturbed


def test_another_size_of_batch_continues_with_the_same_samples(counted, loader_of):
    first = loader_of([counted], batch=6)
    rows = rows_of(islice(first, 5))
    second = loader_of([counted], batch=15)
    second.load_state_dict(first.state_dict())
    rows += rows_of(islice(second, 2))
    assert rows == rows_of(islice(loader_of([counted], batch=60), 1))


def test_the_position_does_not_count_what_is_only_prefetched(counted, loader_of):
    loader = loader_of([counted], prefetch=9, num_workers=3)
    assert loader.num_samples == 0
    list(islice(loader, 2))
    assert loader.num_samples == 12
    assert loader.epochs == {"counted": pytest.approx(12 / 99)}


def test_sources_may_be_added_and_reweighted_but_not_lost(tmp_path, counted, loader_of):
    other = Source("other", counting(tmp_path / "other", 200))
    loader = loader_of([counted])
    list(islice(loader, 3))
    more = loader_of([other, Source("counted", counted.shards, weight=3.0)])
    more.load_state_dict(loader.state_dict())
    batches = list(islice(more, 20))
    assert np.bincount(np.concatenate([b.sources for b in batches])).tolist() == [30, 90]
    seen = rows_of(batches)
    assert not set(rows_of(islice(loader_of([counted]), 3))) & set(seen[:40]) - set(
        rows_of(islice(loader_of([other]), 9))
    )
    with pytest.raises(ValueError, match="contains source 'other'"):
        loader.load_state_dict(more.state_dict())
    loader_of([counted, Source("other", other.shards, weight=0)]).load_state_dict(more.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 9}, "context 10, but this loader has 9"),
        ({"seed": 4}, "seed 3, but this loader has 4"),
    ],
)
def test_a_position_of_other_samples_is_refused(counted, loader_of, change, message):
    loader = loader_of([counted])
    list(islice(loader, 2))
    other = loader_of([counted], **change)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())
    assert other.num_samples == 0


def test_a_position_of_other_tokens_is_refused(tmp_path, counted, loader_of):
    changed = Source("counted", write(tmp_path / "changed", [[5] * 1000]))
    with pytest.raises(ValueError, match="prepared again"):
        loader_of([changed]).load_state_dict(loader_of([counted]).state_dict())


def test_documents_are_numbered_within_a_row_and_their_borders_may_be_masked(tmp_path, loader_of):
    documents = [[1, 1, 1, 1], [2, 2, 2], [3] * 8]
    source = Source("x", write(tmp_path / "x", documents, end_of_document=9))
    batch = next(loader_of([source], context=17, batch=1, mask_documents=True))
    assert batch.tokens.tolist() == [[1, 1, 1, 1, 9, 2, 2, 2, 9, 3, 3, 3, 3, 3, 3, 3, 3]]
    assert batch.documents.tolist() == [[0] * 5 + [1] * 4 + [2] * 8]
    assert batch.targets.tolist() == [[1, 1, 1, 9, -100, 2, 2, 9, -100, 3, 3, 3, 3, 3, 3, 3, 9]]
    plain = next(loader_of([source], context=17, batch=1))
    assert plain.targets.tolist() == [[1, 1, 1, 9, 2, 2, 2, 9, 3, 3, 3, 3, 3, 3, 3, 3, 9]]


def test_a_damaged_file_is_an_error_and_no_sample_is_skipped(tmp_path, loader_of):
    source = Source("x", counting(tmp_path / "x", 101, vocabulary_size=200))
    loader = loader_of([source], batch=10)
    path = tmp_path / "x" / "tokens_00000.bin"
    good = path.read_bytes()
    with path.open("r+b") as file:  # in place: the memory map shows it
        file.write(b"\xff" * len(good))
    for _ in range(2):
        with pytest.raises(TokenShardsError, match="damaged"):
            next(loader)
    assert loader.num_samples == 0
    with path.open("r+b") as file:
        file.write(good)
    loader.load_state_dict(loader.state_dict())
    assert len(set(rows_of([next(loader)]))) == 10


def test_closing_leaves_no_thread_and_the_loader_refuses_to_go_on(counted, loader_of):
    before = set(threading.enumerate())
    with loader_of([counted], num_workers=3) as loader:
        list(islice(loader, 3))
    assert set(threading.enumerate()) <= before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"prefetch": 0}, "prefetch must be at least 1"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, got 2"),
        ({"context": 1000}, "1,000 tokens are too few: context 1000 requires at least 1001"),
    ],
)
def test_impossible_arguments_are_refused(counted, settings, message):
    with pytest.raises(ValueError, match=message):
        TokenLoader([counted], **{"context": 10, "batch": 6, **settings})


def test_names_differ_and_weights_are_numbers(counted):
    with pytest.raises(ValueError, match="the same name"):
        TokenLoader([counted, counted], context=10, batch=1)
    with pytest.raises(
        ValueError, match="weight of source 'x' must be finite and at least 0, got -1"
    ):
        Source("x", counted.shards, weight=-1)


def test_a_folder_is_opened_once_and_read_by_many_threads(tmp_path, loader_of):
    shards = counting(tmp_path / "many", 5000, shard_tokens=100)
    rows = rows_of(islice(loader_of([Source("m", shards)], num_workers=8, prefetch=16), 80))
    alone = Source("m", TokenShards(tmp_path / "many"))
    assert rows == rows_of(islice(loader_of([alone]), 80))
