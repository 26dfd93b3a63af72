"""The position of a loader in a checkpoint: saved by some ranks, continued by others."""

from __future__ import annotations

from itertools import chain

import pytest

import echelon.dist as dist
from echelon.dist.checkpoint import load, save
from echelon.tokens import Source, TokenLoader, TokenShards
from tests.support.ranks import run_ranks
from tests.tokens.texts import counting

pytestmark = pytest.mark.ranks


def _read(rank: int, world_size: int, folder: str, num_batches: int, resumes: bool) -> list[int]:
    """Return the first token of each row that this rank received; two to a batch on 2 ranks."""
    dist.init("shm")
    sources = [Source(name, TokenShards(f"{folder}/{name}")) for name in ("a", "b")]
    with TokenLoader(sources, context=10, batch=6, rank=rank, world_size=world_size) as loader:
        if resumes:
            load(f"{folder}/saved", {"loader": loader})
        rows = [row for _ in range(num_batches) for row in next(loader).tokens[:, 0].tolist()]
        save(f"{folder}/saved", {"loader": loader})
    dist.shutdown()
    return rows


def test_three_ranks_continue_at_the_sample_where_two_stopped(tmp_path):
    for name in ("a", "b"):
        counting(tmp_path / name, 1000)
    two = run_ranks(_read, 2, str(tmp_path), 7, False)
    three = run_ranks(_read, 3, str(tmp_path), 8, True)
    sources = [Source(name, TokenShards(tmp_path / name)) for name in ("a", "b")]
    with TokenLoader(sources, context=10, batch=6) as alone:
        expected = [next(alone).tokens[:, 0].tolist() for _ in range(15)]
    assert sorted(chain(*two)) == sorted(chain(*expected[:7]))
    for number, batch in enumerate(expected[7:]):
        parts = [rows[2 * number : 2 * number + 2] for rows in three]
        assert list(chain(*parts)) == batch
