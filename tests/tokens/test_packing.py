"""Packed documents: each pair of tokens once, none across documents, rows as full as they get."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from echelon.errors import TokenShardsError
from echelon.tokens import ShardWriter, Source, TokenLoader, TokenShards
from echelon.tokens.packing import Packs, first_fit
from echelon.tokens.windows import NOT_COUNTED
from tests.tokens.texts import random_documents, write


def pairs_of(documents):
    return Counter(pair for one in documents for pair in pairwise(one))


def pairs_in(rows):
    return Counter(
        (token, target)
        for row in rows
        for token, target in zip(row.tokens.tolist(), row.targets.tolist(), strict=True)
        if target != NOT_COUNTED
    )


def distinct(sizes):
    """Documents in which no token stands twice: a pair says where it is."""
    ends = np.cumsum([0, *sizes])
    return [list(range(first, end)) for first, end in pairwise(ends)]


@pytest.mark.parametrize("context", [4, 7, 16, 64])
def test_every_pair_of_a_document_stands_once_and_none_joins_two(tmp_path, context):
    sizes = [len(one) for one in random_documents(5, 200)] + [1, 2, context, context + 1, 150]
    documents = distinct(sizes)
    packs = Packs(write(tmp_path / "shards", documents, shard_tokens=97), context)
    rows = [packs.read(number) for number in range(len(packs))]
    assert pairs_in(rows) == pairs_of(documents)
    num_pairs = sum(size - 1 for size in sizes)
    assert packs.padding == pytest.approx(1 - num_pairs / (len(packs) * context))
    for row in rows:
        assert len(row.tokens) == len(row.targets) == len(row.documents) == context
        assert (np.diff(row.documents) >= 0).all()
        assert set(np.diff(row.documents).tolist()) <= {0, 1}


def test_a_document_that_was_not_ended_and_padding_by_the_end_token(tmp_path):
    with ShardWriter(tmp_path / "shards", vocabulary_size=100, end_of_document=99) as writer:
        writer.add([1, 2, 3])
        writer.end_document()
        writer.add([4, 5])
    packs = Packs(TokenShards(tmp_path / "shards"), 8)
    row = packs.read(0)
    assert len(packs) == 1
    assert row.tokens.tolist()[:4] == [1, 2, 3, 4]
    assert row.targets.tolist()[:4] == [2, 3, 99, 5]
    assert set(row.tokens.tolist()[5:]) == {99}
    assert row.targets.tolist()[5:] == [NOT_COUNTED] * 3
    assert row.documents.tolist()[:4] == [0, 0, 0, 1]
    assert len(set(row.documents.tolist()[5:])) == 1


def test_each_piece_lies_in_the_first_open_row_with_room():
    sizes = np.array([6, 5, 4, 10, 5, 3, 2, 1])
    assert first_fit(sizes, 10).tolist() == [0, 1, 0, 3, 1, 2, 2, 2]


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_hold_what_fits_and_most_are_full(seed):
    sizes = np.random.default_rng(seed).integers(1, 65, 20_000)
    rows = first_fit(sizes, 64)
    held = np.bincount(rows, sizes)
    assert held.max() <= 64
    assert held.min() > 0
    assert sizes.sum() / (len(held) * 64) > 0.97


@pytest.fixture
def loader_of():
    made = []

    def make(source, **settings) -> TokenLoader:
        settings = {"context": 16, "batch": 6, "pack_documents": True, **settings}
        made.append(TokenLoader([source], **settings))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def _rows(batches):
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


@pytest.fixture
def source(tmp_path):
    return Source("text", write(tmp_path / "text", random_documents(7, 120)))


def test_the_stream_continues_at_the_sample_on_another_number_of_ranks(source, loader_of):
    whole = _rows(islice(loader_of(source), 30))
    before = [loader_of(source, rank=rank, world_size=4) for rank in range(4)]
    rows = [row for _ in range(11) for row in _rows(next(one) for one in before)]
    after = [loader_of(source, rank=rank, world_size=3) for rank in range(3)]
    for loader in after:
        loader.load_state_dict(before[1].state_dict())
    rows += [row for _ in range(19) for row in _rows(next(one) for one in after)]
    assert rows == whole


def test_a_position_in_windows_is_none_in_packed_rows(source, loader_of):
    state = loader_of(source, pack_documents=False).state_dict()
    with pytest.raises(
        ValueError, match="saved with pack_documents=False, but this loader has pack_documents=True"
    ):
        loader_of(source).load_state_dict(state)
    del state["pack_documents"]  # of before there was packing
    loader_of(source, pack_documents=False).load_state_dict(state)


def test_positions_start_again_with_each_document(source, loader_of):
    batch = next(loader_of(source))
    for documents, positions in zip(batch.documents, batch.positions, strict=True):
        for number in set(documents.tolist()):
            found = positions[documents == number]
            assert found.tolist() == list(range(len(found)))


def test_documents_of_one_token_and_damaged_ends_are_refused(tmp_path, loader_of):
    alone = Source("ones", write(tmp_path / "ones", [[1], [2], [3]]))
    with pytest.raises(ValueError, match="source 'ones': no document has at least two tokens"):
        loader_of(alone)
    shards = write(tmp_path / "damaged", [[1, 2], [3, 4]])
    file = tmp_path / "damaged" / shards.index.shards[0].documents_name
    file.write_bytes(np.array([4, 2], "<i8").tobytes())
    with pytest.raises(TokenShardsError, match="a file is damaged"):
        Packs(TokenShards(tmp_path / "damaged"), 8)
